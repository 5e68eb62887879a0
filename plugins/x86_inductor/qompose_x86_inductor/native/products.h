// SPDX-License-Identifier: Apache-2.0
// Products of unsigned bytes and int8 weights, of matrices and of the windows of images, on AVX-512 VNNI.
#pragma once

#include <omp.h>

#include "finish.h"
#include "windows.h"

namespace qompose_x86 {

constexpr int WIDEST = 4;  // vectors of 16 channels that a tile has
constexpr int MOST_ROWS[] = {0, 12, 12, 8,
                             6};  // by that width: at most 24 sums, so that all fit in registers
constexpr int MOST_SUMS = 24;

// Sums of ROWS windows for 16 * WIDTH channels. Weights: [run][quad][channel][4].
template <int WIDTH, int ROWS>
void sum_tile(const Bytes* where, int64_t runs, int64_t quads, const int8_t* weights, const int32_t* start,
              __m512i* sums) {
  __m512i acc[ROWS][WIDTH];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < WIDTH; ++j) acc[r][j] = _mm512_loadu_si512(start + 16 * j);
  for (int64_t run = 0; run < runs; ++run, where += ROWS) {
    Bytes from[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) from[r] = where[r];
    for (int64_t quad = 0; quad < quads; ++quad, weights += 64 * WIDTH) {
      __m512i w[WIDTH];
#pragma GCC unroll 16
      for (int j = 0; j < WIDTH; ++j) w[j] = _mm512_loadu_si512(weights + 64 * j);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        int32_t four;
        std::memcpy(&four, from[r] + 4 * quad, 4);
        const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 16
        for (int j = 0; j < WIDTH; ++j) acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], x, w[j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < WIDTH; ++j) _mm512_store_si512(sums + r * WIDTH + j, acc[r][j]);
}

using SumTile = void (*)(const Bytes*, int64_t, int64_t, const int8_t*, const int32_t*, __m512i*);

template <int WIDTH, int ROWS = MOST_ROWS[WIDTH]>
SumTile sum_of(int rows) {
  if constexpr (ROWS == 1)
    return sum_tile<WIDTH, 1>;
  else
    return rows == ROWS ? sum_tile<WIDTH, ROWS> : sum_of<WIDTH, ROWS - 1>(rows);
}

inline SumTile sum_of(int width, int rows) {
  switch (width) {
    case 1:
      return sum_of<1>(rows);
    case 2:
      return sum_of<2>(rows);
    case 3:
      return sum_of<3>(rows);
    default:
      return sum_of<4>(rows);
  }
}

// A panel is 64 channels, the last one what is left; `tiles` cut its windows up.
struct Panels {
  int64_t pixels, count, tiles, last_tiles;
  int last_width;

  Panels(const Image& g, int64_t channels) : pixels(g.pixels()) {
    const int64_t vectors = (channels + 15) / 16;
    count = (vectors + WIDEST - 1) / WIDEST;
    last_width = static_cast<int>(vectors - (count - 1) * WIDEST);
    tiles = cut(WIDEST);
    last_tiles = cut(last_width);
  }
  int64_t cut(int width) const { return (pixels + MOST_ROWS[width] - 1) / MOST_ROWS[width]; }
  int64_t work() const { return tiles * (count - 1) + last_tiles; }
  int width(int64_t panel) const { return panel + 1 == count ? last_width : WIDEST; }
};

inline void work_on(const Image& g, const Panels& p, const int8_t* weights, const Finish& f, int64_t from,
                    int64_t to, void* out) {
  const FinishTile finish = finish_of(f);
  Windows windows(g, MOST_ROWS[1]);
  std::vector<Bytes> where(MOST_ROWS[1] * g.runs());
  alignas(64) __m512i sums[MOST_SUMS];
  while (from < to) {
    const int64_t panel = p.tiles == 0 ? 0 : std::min(from / p.tiles, p.count - 1);
    const int64_t first = panel * p.tiles, stop = std::min(to, panel + 1 == p.count ? to : first + p.tiles);
    const int width = p.width(panel), most = MOST_ROWS[width];
    const int8_t* panel_weights = weights + panel * g.runs() * g.quads() * 64 * WIDEST;
    for (; from < stop; ++from) {
      const int64_t row = (from - first) * most;
      const int rows = static_cast<int>(std::min<int64_t>(most, p.pixels - row));
      windows.find(row, rows, where.data());
      sum_of(width, rows)(where.data(), g.runs(), g.quads(), panel_weights, f.start + panel * 64, sums);
      finish(f, sums, rows, width, row, panel * 64, out);
    }
  }
}

inline void product(const Image& g, const int8_t* weights, const Finish& f, void* out) {
  const Panels p(g, f.channels);
  const int64_t work = p.work();
#pragma omp parallel
  {
    const int64_t id = omp_get_thread_num(), count = omp_get_num_threads();
    work_on(g, p, weights, f, work * id / count, work * (id + 1) / count, out);
  }
}

}  // namespace qompose_x86
