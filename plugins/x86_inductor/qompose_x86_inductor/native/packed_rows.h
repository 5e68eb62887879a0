// SPDX-License-Identifier: Apache-2.0
// Linears by packed weights: what they are given, and their rows as they are multiplied.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "packed_lanes.h"
#include "threads.h"

namespace qompose_x86 {
namespace packed {

enum RowMode { FLOATS, SYMMETRIC, AFFINE };

struct Linear {
  int64_t rows, depth, channels, group;  // depth: in whole units
  int bits;
  RowMode mode;
  const uint8_t* weight;  // [panel][unit][lane], 4 * bits bytes for each lane and unit: see `value`
  const void* scales;     // [panel][group][lane], float32 or bfloat16
  bool half_scales;
  const int8_t* zero_points;  // [panel][group][lane], or none
  const float* columns;       // by channel: the sum of its weights. For rows with zero points
  const float* bias;          // by channel, or none
  float* out;
  int64_t line;  // floats from a row of `out` to the next

  QOMPOSE_INLINE int64_t panels() const { return (channels + LANES - 1) / LANES; }
  QOMPOSE_INLINE int64_t groups() const { return group ? depth / group : 0; }
  int64_t unit_bytes() const { return LANES * bits; }
  const uint8_t* weight_at(int64_t panel, int64_t k) const {
    return weight + (panel * depth + k) / UNIT * unit_bytes();
  }
};

QOMPOSE_INLINE Floats scale_of(const Linear& p, int64_t panel, int64_t g) {
  const int64_t at = (panel * p.groups() + g) * LANES;
  if (p.half_scales) return from_halves(static_cast<const uint16_t*>(p.scales) + at);
  return load(static_cast<const float*>(p.scales) + at);
}

QOMPOSE_INLINE Ints zero_points_of(const Linear& p, int64_t panel, int64_t g) {
  return widened(p.zero_points + (panel * p.groups() + g) * LANES);
}

struct alignas(64) Line {
  float f[LANES];
};
using Scratch = std::vector<Line>;

// The rows as they are multiplied, in whole units: floats, or integers, as bytes or as floats.
struct Rows {
  const float* x = nullptr;      // (rows, depth)
  std::vector<float> own;        // holds x where it is not the caller's
  std::vector<int8_t> integers;  // (rows, depth)
  std::vector<float> scales, zero_points;
  std::vector<float> float_sums;  // (rows, groups): for weights with zero points
  std::vector<int32_t> sums;      // likewise of integers: for bytes, which are unsigned
};

#ifdef QOMPOSE_BYTES
constexpr bool BYTES = true;
#else
constexpr bool BYTES = false;
#endif

// torch's compiler switches the vectorizing of loops off, for its own are written in vectors.
#pragma GCC push_options
#pragma GCC optimize("O3,tree-loop-vectorize")
// Choose scale and zero point of a row as `kit.choose_qparams_per_row` does. What is not finite makes the
// scale, and so the whole row, NaN.
inline void choose(const float* x, int64_t depth, RowMode mode, float& scale, float& zero_point) {
  float low[LANES] = {}, high[LANES] = {}, unlike[LANES] = {};
  const auto widen = [&](const float* from) {  // by a count that is known, so that it takes few instructions
    for (int i = 0; i < LANES; ++i) {
      const float v = from[i];
      low[i] = v < low[i] ? v : low[i];
      high[i] = v > high[i] ? v : high[i];
      unlike[i] += v * 0.0f;  // NaN for what is not finite
    }
  };
  int64_t k = 0;
  for (; k + LANES <= depth; k += LANES) widen(x + k);
  float last[LANES] = {};
  std::copy_n(x + k, depth - k, last);
  widen(last);
  const float least = *std::min_element(low, low + LANES), most = *std::max_element(high, high + LANES);
  const bool finite = std::all_of(unlike, unlike + LANES, [](float v) { return v == 0; });
  zero_point = 0;
  if (mode == SYMMETRIC) {
    scale = std::max(std::max(-least, most), 1e-5f) / 127.0f;
  } else {
    scale = std::max((most - least) / 255.0f, std::numeric_limits<float>::epsilon());
    const float down = least / scale, up = most / scale;
    const float real = (-128.0f + down) + (127.0f + up) > 0 ? -128.0f - down : 127.0f - up;
    zero_point = std::nearbyint(std::min(std::max(real, -128.0f), 127.0f));
  }
  if (!finite || !(scale <= std::numeric_limits<float>::max()))
    scale = std::numeric_limits<float>::quiet_NaN();
}

// Quantize a row, as `kit.quantize_rows` does.
template <typename Integer>
void quantize(const float* x, int64_t depth, float scale, float zero_point, Integer* to) {
  const float inverse = std::isnan(scale) ? 0.0f : 1.0f / scale;
  for (int64_t k = 0; k < depth; ++k) {
    float v = x[k] * inverse + zero_point;
    v = v > -128.0f ? v : -128.0f;  // NaN too
    v = v < 127.0f ? v : 127.0f;
    to[k] = static_cast<Integer>(std::nearbyint(v));
  }
}

template <typename Value, typename Sum>
void sum_groups(const Linear& p, const Value* x, Sum* to) {
  for (int64_t g = 0; g < p.groups(); ++g) {
    Sum sum = 0;
    for (int64_t k = g * p.group; k < (g + 1) * p.group; ++k) sum += x[k];
    to[g] = sum;
  }
}

#pragma GCC pop_options

// Return rows of `given` inputs as they are multiplied.
inline Rows prepared(const Linear& p, const float* x, int64_t given, int threads) {
  Rows rows;
  rows.x = x;
  if (given != p.depth) {
    rows.own.resize(p.rows * p.depth);
    for (int64_t m = 0; m < p.rows; ++m) std::copy_n(x + m * given, given, &rows.own[m * p.depth]);
    rows.x = rows.own.data();
  }
  const bool bytes = BYTES && p.mode != FLOATS, floats = !BYTES && p.mode != FLOATS;
  if (bytes) {
    rows.integers.resize(p.rows * p.depth);
    rows.sums.resize(p.rows * p.groups());
  }
  std::vector<float> as_floats(floats ? p.rows * p.depth : 0);
  if (p.mode != FLOATS) {
    rows.scales.resize(p.rows);
    rows.zero_points.resize(p.rows);
  }
  if (!bytes && p.zero_points) rows.float_sums.resize(p.rows * p.groups());
  const auto prepare = [&](int, int64_t from, int64_t to) {
    for (int64_t m = from; m < to; ++m) {
      const float* row = rows.x + m * p.depth;
      if (p.mode != FLOATS) {
        choose(row, p.depth, p.mode, rows.scales[m], rows.zero_points[m]);
        if (bytes) {
          int8_t* integers = &rows.integers[m * p.depth];
          quantize(row, p.depth, rows.scales[m], rows.zero_points[m], integers);
          sum_groups(p, integers, &rows.sums[m * p.groups()]);
          continue;
        }
        quantize(row, p.depth, rows.scales[m], rows.zero_points[m], &as_floats[m * p.depth]);
        row = &as_floats[m * p.depth];
      }
      if (p.zero_points) sum_groups(p, row, &rows.float_sums[m * p.groups()]);
    }
  };
  if (bytes || floats || !rows.float_sums.empty())
    in_parallel(threads_for(8 * p.rows * p.depth, p.rows, threads), p.rows, prepare);
  if (floats) {
    rows.own = std::move(as_floats);
    rows.x = rows.own.data();
  }
  return rows;
}

// Bring sums of a row to real units, and write those of the panel's channels.
QOMPOSE_INLINE void finish(const Linear& p, const Rows& rows, int64_t m, int64_t panel, Floats total) {
  const int64_t channel = panel * LANES, count = std::min<int64_t>(LANES, p.channels - channel);
  const Floats bias = p.bias ? load_some(p.bias + channel, count) : all(0);
  if (p.mode == AFFINE) total = madd(all(-rows.zero_points[m]), load_some(p.columns + channel, count), total);
  total = madd(total, all(p.mode == FLOATS ? 1.0f : rows.scales[m]), bias);
  store_some(p.out + m * p.line + channel, total, count);
}

#ifdef QOMPOSE_BYTES
// Add to each lane the products of its four unsigned bytes, of so many bits, and four signed ones.
template <int BITS>
QOMPOSE_INLINE Ints dot(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
#else
  if constexpr (BITS == 4)  // two products fit in 16 bits
    return added(sum, pairs(byte_pairs(unsigned_bytes, signed_bytes), all_ints(0x00010001)));
  const Ints even = pairs(both(unsigned_bytes, all_ints(0x00ff00ff)), even_bytes(signed_bytes));
  return added(sum, added(even, pairs(words_right<8>(unsigned_bytes), odd_bytes(signed_bytes))));
#endif
}
#endif

}  // namespace packed
}  // namespace qompose_x86
