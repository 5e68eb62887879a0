// SPDX-License-Identifier: Apache-2.0
// Linears by packed weights, of rows for which it pays to unpack them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "packed_rows.h"

namespace qompose_x86 {
namespace packed {

// -- floats: a block of weights is made such in the first cache
constexpr int64_t BLOCK = 128;  // inputs
constexpr int TILE = 8, PAIR = 2;

// Write (k, PAIR * LANES) weights of inputs `first` to `last` as floats.
template <int BITS>
void unpack(const Linear& p, int64_t panel, int64_t panels, int64_t first, int64_t last, Line* to) {
  for (int64_t j = 0; j < panels; ++j) {
    const uint8_t* weight = p.weight_at(panel + j, first);
    for (int64_t k = first; k < last; k += UNIT, weight += LANES * BITS) {
      const int64_t g = k / p.group;
      const Floats scale = scale_of(p, panel + j, g);
      const Floats zero = p.zero_points ? to_floats(zero_points_of(p, panel + j, g)) : all(0);
      const Floats shift = madd(madd(zero, all(-1), all(0)), scale, all(0));
      Ints lanes[BITS / 4];
      for (int i = 0; i < BITS / 4; ++i) lanes[i] = load_lanes(weight + 64 * i);
#pragma GCC unroll 16
      for (int i = 0; i < UNIT; ++i)
        store(to[(k - first + i) * PAIR + j].f, madd(value<BITS>(lanes, i), scale, shift));
    }
  }
}

// Add TILE rows of x, (k, TILE), times weights to sums, (TILE, PAIR).
inline void add_block(const float* x, const Line* weights, int64_t count, Line* sums) {
  Floats sum[TILE][PAIR];
#pragma GCC unroll 16
  for (int r = 0; r < TILE; ++r)
    for (int j = 0; j < PAIR; ++j) sum[r][j] = load(sums[r * PAIR + j].f);
  for (int64_t k = 0; k < count; ++k, x += TILE, weights += PAIR) {
    const Floats left = load(weights[0].f), right = load(weights[1].f);
#pragma GCC unroll 16
    for (int r = 0; r < TILE; ++r) {
      const Floats value = all(x[r]);
      sum[r][0] = madd(value, left, sum[r][0]);
      sum[r][1] = madd(value, right, sum[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < TILE; ++r)
    for (int j = 0; j < PAIR; ++j) store(sums[r * PAIR + j].f, sum[r][j]);
}

// Write TILE rows from `m` on as (k, TILE); of a last tile, the last row again.
inline void transpose(const Linear& p, const Rows& rows, int64_t m, float* to) {
  const float* x[TILE];
  for (int r = 0; r < TILE; ++r) x[r] = rows.x + std::min(m + r, p.rows - 1) * p.depth;
  for (int64_t k = 0; k < p.depth; ++k)
#pragma GCC unroll 16
    for (int r = 0; r < TILE; ++r) to[k * TILE + r] = x[r][k];
}

template <int BITS>
void many_rows(const Linear& p, const Rows& rows, int threads) {
  const int64_t tiles = (p.rows + TILE - 1) / TILE, pairs = (p.panels() + PAIR - 1) / PAIR;
  const std::unique_ptr<float[]> x(new float[tiles * TILE * p.depth]);  // (tile, k, TILE)
  in_parallel(threads, tiles, [&](int, int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) transpose(p, rows, t * TILE, &x[t * TILE * p.depth]);
  });
  const int64_t block_lines = BLOCK * PAIR, each = block_lines + tiles * TILE * PAIR;
  Scratch scratch(threads * each);
  in_parallel(threads, pairs, [&](int thread, int64_t from, int64_t to) {
    Line *weights = &scratch[thread * each], *sums = weights + block_lines;
    for (int64_t panel = from * PAIR; panel < std::min(to * PAIR, p.panels()); panel += PAIR) {
      const int64_t panels = std::min<int64_t>(PAIR, p.panels() - panel);
      std::fill(sums, sums + tiles * TILE * PAIR, Line{});
      for (int64_t k = 0; k < p.depth; k += BLOCK) {
        const int64_t count = std::min(BLOCK, p.depth - k);
        unpack<BITS>(p, panel, panels, k, k + count, weights);
        for (int64_t t = 0; t < tiles; ++t)
          add_block(&x[(t * p.depth + k) * TILE], weights, count, sums + t * TILE * PAIR);
      }
      for (int64_t m = 0; m < p.rows; ++m)
        for (int64_t j = 0; j < panels; ++j) finish(p, rows, m, panel + j, load(sums[m * PAIR + j].f));
    }
  });
}

#ifdef __AVX512BW__
// -- bytes: weights are unpacked once for all rows, as signed bytes less their zero points, and
// rows become unsigned: what that adds to a sum is the same for all rows.
constexpr int HIGH = 6;  // rows of a tile: its sums and totals are most of the registers
constexpr int QUAD = 4;  // bytes that are multiplied together
// Zero points of four bits from 0: the products of two bytes by two weights less such fit in 16 bits, which
// holds up to 56, and weights of symmetric groups have none, of others up to 8.
constexpr int FARTHEST = 16;
template <int BITS>
constexpr int64_t MANY = (BITS == 4 ? 2 : 3) * HIGH;  // rows for which unpacking pays

// As in packed_rows.h, and here for all zero points in each call.
#pragma GCC push_options
#pragma GCC optimize("O3,tree-loop-vectorize")
inline bool has_distant_zero_points(const Linear& p) {
  if (!p.zero_points) return false;
  if (p.bits == 8) return true;  // less any but 0, a weight may be no byte
  int least = 0, most = 0;
  for (int64_t i = 0; i < p.panels() * p.groups() * LANES; ++i) {
    least = std::min<int>(least, p.zero_points[i]);
    most = std::max<int>(most, p.zero_points[i]);
  }
  return least < -FARTHEST || most > FARTHEST;
}
#pragma GCC pop_options

// Panels as they are multiplied.
struct Panels {
  Line* weights;  // [quad][PAIR], four bytes in each lane
  Line* starts;   // [group][PAIR]: what sums of unsigned rows start from
  Line* scales;   // [group][PAIR]

  static int64_t lines(const Linear& p) { return PAIR * (p.depth / QUAD + 2 * p.groups()); }
  Panels(const Linear& p, Line* scratch)
      : weights(scratch), starts(weights + PAIR * p.depth / QUAD), scales(starts + PAIR * p.groups()) {}
};

// The same as `dot`, in the same register: GCC would copy sums from one to another, and have none left for
// totals.
template <int BITS>
QOMPOSE_INLINE void add_dot(Ints& sum, Ints unsigned_bytes, Ints signed_bytes) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
#else
  sum = dot<BITS>(sum, unsigned_bytes, signed_bytes);
#endif
}

// For GCC this is another value from here on, which it does not load again for each of its uses.
QOMPOSE_INLINE Ints in_a_register(Ints v) {
  asm("" : "+v"(v));
  return v;
}

QOMPOSE_INLINE void store_lanes(Line* to, Ints v) { _mm512_store_si512(to, v); }
QOMPOSE_INLINE Ints lanes_of(const Line& from) { return _mm512_load_si512(&from); }

// A unit of weights less their zero points, from its bytes.
template <int BITS>
QOMPOSE_INLINE void signed_bytes(const uint8_t* weight, Ints zeros, Ints& low, Ints& high) {
  low = load_lanes(weight);
  if constexpr (BITS == 8) {
    high = load_lanes(weight + 64);
  } else {
    const Ints mask = all_ints(0x0f0f0f0f);
    high = _mm512_sub_epi8(both(words_right<4>(low), mask), zeros);
    low = _mm512_sub_epi8(both(low, mask), zeros);
  }
}

// Write PAIR panels; of a last one alone, that one again.
template <int BITS>
void unpack_bytes(const Linear& p, int64_t first, Panels to) {
  const Ints middle = all_ints(static_cast<int32_t>(0x80808080));
  for (int j = 0; j < PAIR; ++j) {
    const int64_t panel = std::min(first + j, p.panels() - 1);
    const uint8_t* weight = p.weight_at(panel, 0);
    Line* out = to.weights + j;
    for (int64_t g = 0; g < p.groups(); ++g) {
      const Ints zero = p.zero_points ? added(zero_points_of(p, panel, g), all_ints(8)) : all_ints(8);
      const Ints zeros = multiplied(both(zero, all_ints(0xff)), all_ints(0x01010101));
      Ints sum = all_ints(0);
      for (int64_t k = 0; k < p.group; k += UNIT, weight += LANES * BITS, out += 2 * PAIR) {
        Ints low, high;
        signed_bytes<BITS>(weight, zeros, low, high);
        store_lanes(out, low);
        store_lanes(out + PAIR, high);
        sum = dot<BITS>(dot<BITS>(sum, middle, low), middle, high);
      }
      store_lanes(&to.starts[g * PAIR + j], _mm512_sub_epi32(all_ints(0), sum));
      store(to.scales[g * PAIR + j].f, scale_of(p, panel, g));
    }
  }
}

// Write HIGH rows from `m` on as (quad, HIGH), unsigned; of a last tile, the last row again.
inline void transpose_bytes(const Linear& p, const Rows& rows, int64_t m, uint32_t* to) {
  for (int r = 0; r < HIGH; ++r) {
    const int8_t* x = &rows.integers[std::min(m + r, p.rows - 1) * p.depth];
    for (int64_t quad = 0; quad < p.depth / QUAD; ++quad) {
      uint32_t four;
      std::memcpy(&four, x + quad * QUAD, QUAD);
      to[quad * HIGH + r] = four ^ 0x80808080u;
    }
  }
}

// HIGH rows of `x`, (quad, HIGH), of which those from `m` on are written, times panels from `first` on.
template <int BITS>
void byte_tile(const Linear& p, const Rows& rows, const uint32_t* x, Panels panels, int64_t m,
               int64_t first) {
  Floats total[HIGH][PAIR];
#pragma GCC unroll 16
  for (int r = 0; r < HIGH; ++r)
    for (int j = 0; j < PAIR; ++j) total[r][j] = all(0);
  const Line* weights = panels.weights;
  for (int64_t g = 0; g < p.groups(); ++g) {
    Ints sums[HIGH][PAIR];
#pragma GCC unroll 16
    for (int r = 0; r < HIGH; ++r)
      for (int j = 0; j < PAIR; ++j) sums[r][j] = lanes_of(panels.starts[g * PAIR + j]);
    for (int64_t k = 0; k < p.group; k += QUAD, x += HIGH, weights += PAIR) {
      const Ints left = in_a_register(lanes_of(weights[0])), right = in_a_register(lanes_of(weights[1]));
#pragma GCC unroll 16
      for (int r = 0; r < HIGH; ++r) {
        const Ints value = all_ints(static_cast<int32_t>(x[r]));
        add_dot<BITS>(sums[r][0], value, left);
        add_dot<BITS>(sums[r][1], value, right);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < HIGH; ++r)
      for (int j = 0; j < PAIR; ++j)
        total[r][j] = madd(to_floats(sums[r][j]), load(panels.scales[g * PAIR + j].f), total[r][j]);
  }
  const int64_t high = p.rows - m, wide = p.panels() - first;
#pragma GCC unroll 16
  for (int r = 0; r < HIGH; ++r)
    for (int j = 0; j < PAIR; ++j)
      if (r < high && j < wide) finish(p, rows, m + r, first + j, total[r][j]);
}

// Linears that read the same rows.
template <int BITS>
void many_rows_of_bytes(const std::vector<Linear>& linears, const Rows& rows, int available) {
  const Linear& any = linears.front();
  const int64_t tiles = (any.rows + HIGH - 1) / HIGH, size = HIGH * any.depth / QUAD;
  const std::unique_ptr<uint32_t[]> x(new uint32_t[tiles * size]);  // (tile, quad, HIGH)
  in_parallel(threads_for(8 * any.rows * any.depth, tiles, available), tiles,
              [&](int, int64_t from, int64_t to) {
                for (int64_t t = from; t < to; ++t) transpose_bytes(any, rows, t * HIGH, &x[t * size]);
              });
  const auto pairs_of = [](const Linear& p) { return (p.panels() + PAIR - 1) / PAIR; };
  const auto threads_of = [&](const Linear& p) {
    return threads_for(p.rows * p.depth * p.channels, pairs_of(p), available);
  };
  int most = 1;
  for (const Linear& p : linears) most = std::max<int>(most, threads_of(p));
  const std::unique_ptr<Line[]> scratch(new Line[most * Panels::lines(any)]);
  for (const Linear& p : linears) {
    in_parallel(threads_of(p), pairs_of(p), [&](int thread, int64_t from, int64_t to) {
      const Panels panels(p, &scratch[thread * Panels::lines(p)]);
      for (int64_t first = from * PAIR; first < to * PAIR; first += PAIR) {
        unpack_bytes<BITS>(p, first, panels);
        for (int64_t t = 0; t < tiles; ++t) byte_tile<BITS>(p, rows, &x[t * size], panels, t * HIGH, first);
      }
    });
  }
}
#endif

}  // namespace packed
}  // namespace qompose_x86
