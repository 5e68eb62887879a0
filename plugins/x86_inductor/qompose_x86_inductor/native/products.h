// SPDX-License-Identifier: Apache-2.0
// Products of unsigned bytes and int8 weights, of matrices and of the windows of images, on AVX-512 VNNI.
#pragma once

#include "finish.h"
#include "threads.h"
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

// What there is to do, as tiles in an order that keeps what they read and write in the cache of a core:
// blocks of windows that read so many bytes, in each all panels of 64 channels, the last with the channels
// that are left.
constexpr int64_t BLOCK_BYTES = 192 << 10;
constexpr int64_t ROUND = 24;  // windows: whole tiles of any width

struct Plan {
  int64_t pixels, block, panels;
  int last_width;

  Plan(const Image& g, int64_t channels) : pixels(g.pixels()) {
    const int64_t vectors = (channels + 15) / 16;
    panels = (vectors + WIDEST - 1) / WIDEST;
    last_width = static_cast<int>(vectors - (panels - 1) * WIDEST);
    const int64_t bytes_each = std::max<int64_t>(1, g.n * g.h * g.w * g.c / pixels);
    block = std::max<int64_t>(1, BLOCK_BYTES / bytes_each / ROUND) * ROUND;
  }
  int width(int64_t panel) const { return panel + 1 == panels ? last_width : WIDEST; }
  int64_t tiles(int64_t first, int64_t panel) const {
    const int64_t most = MOST_ROWS[width(panel)], count = std::min(block, pixels - first);
    return (count + most - 1) / most;
  }
  int64_t work() const {
    int64_t sum = 0;
    for (int64_t first = 0; first < pixels; first += block)
      sum += (panels - 1) * tiles(first, 0) + tiles(first, panels - 1);
    return sum;
  }
};

// Sums of one tile after another, with memory of its own.
class Worker {
 public:
  Worker(const Image& image, const int8_t* weights, const Finish& f, void* out)
      : g(image),
        weights(weights),
        f(f),
        out(out),
        finish(finish_of(f)),
        runs(g.runs()),
        quads(g.quads()),
        windows(g, MOST_ROWS[1]),
        where(MOST_ROWS[1] * runs) {}

  // Tiles `from` to `to` of all of a plan.
  void work(const Plan& plan, int64_t from, int64_t to) noexcept {
    int64_t before = 0;
    for (int64_t first = 0; first < plan.pixels && before < to; first += plan.block)
      for (int64_t panel = 0; panel < plan.panels && before < to; ++panel) {
        const int64_t count = plan.tiles(first, panel), most = MOST_ROWS[plan.width(panel)];
        const int64_t stop = std::min(first + plan.block, plan.pixels);
        for (int64_t tile = std::max<int64_t>(0, from - before); tile < std::min(count, to - before);
             ++tile) {
          find(first + tile * most, std::min(most, stop - first - tile * most));
          sum(panel * 64, plan.width(panel));
        }
        before += count;
      }
  }

  // Tiles `from` to `to` of all groups: windows of `most` pixels, and for them one group after the other.
  void work_in_groups(int64_t channels_each, int64_t most, int64_t from, int64_t to) noexcept {
    const int64_t groups = g.groups();
    for (int64_t unit = from; unit < to; ++unit) {
      const int64_t group = unit % groups, first = unit / groups * most;
      if (unit == from || group == 0) {
        find(first, std::min(most, g.pixels() - first));
        shift(group);
      } else {
        shift(1);
      }
      const int64_t stop = std::min((group + 1) * channels_each, f.channels);
      for (int64_t channel = group * channels_each; channel < stop; channel += 64)
        sum(channel, static_cast<int>(std::min<int64_t>(WIDEST, (stop - channel + 15) / 16)));
    }
  }

 private:
  void find(int64_t pixel, int64_t count) {
    row = pixel;
    rows = static_cast<int>(count);
    windows.find(row, rows, where.data());
  }

  void shift(int64_t groups) {
    for (int64_t i = 0; i < runs * rows; ++i) where[i] += groups * g.group_depth;
  }

  void sum(int64_t channel, int width) {
    const int8_t* panel = weights + channel * runs * quads * 4;
    sum_of(width, rows)(where.data(), runs, quads, panel, f.start + channel, sums);
    finish(f, sums, rows, width, row, channel, out);
  }

  const Image& g;
  const int8_t* weights;
  const Finish& f;
  void* out;
  const FinishTile finish;
  const int64_t runs, quads;
  Windows windows;
  std::vector<Bytes> where;
  int64_t row = 0;
  int rows = 0;
  alignas(64) __m512i sums[MOST_SUMS];
};

// `group_channels`: of the result, of each group, a multiple of 16.
inline void product(const Image& g, const int8_t* weights, const Finish& f, int64_t group_channels, void* out,
                    int available) {
  const Plan plan(g, f.channels);
  const int64_t most = MOST_ROWS[std::min<int64_t>(WIDEST, (group_channels + 15) / 16)];
  const int64_t tiles = g.group_depth ? (g.pixels() + most - 1) / most * g.groups() : plan.work();
  const int threads = threads_for(g.pixels() * f.channels * g.runs() * g.quads() * 4, tiles, available);
  std::vector<Worker> workers;
  workers.reserve(threads);
  for (int each = 0; each < threads; ++each) workers.emplace_back(g, weights, f, out);
  in_parallel(threads, tiles, [&](int thread, int64_t from, int64_t to) {
    if (g.group_depth)
      workers[thread].work_in_groups(group_channels, most, from, to);
    else
      workers[thread].work(plan, from, to);
  });
}

}  // namespace qompose_x86
