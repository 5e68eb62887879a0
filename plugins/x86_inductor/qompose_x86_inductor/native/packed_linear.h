// SPDX-License-Identifier: Apache-2.0
// Linears by weights of four or eight bits, with scales for groups of inputs, as native/packed_linear.py
// packs them. Inputs are floats, or quantized here, each row with a scale of its own. With AVX2 or AVX-512
// the latter are multiplied as bytes; elsewhere as floats, whose sums may round.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "inlining.h"
#include "threads.h"
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qompose_x86 {
namespace packed {

constexpr int LANES = 16;  // output channels of a panel
constexpr int UNIT = 8;    // inputs that are packed together

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

// -- sixteen numbers
#ifdef __AVX512F__
using Floats = __m512;
using Ints = __m512i;
QOMPOSE_INLINE Floats all(float value) { return _mm512_set1_ps(value); }
QOMPOSE_INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
QOMPOSE_INLINE void store(float* to, Floats v) { _mm512_storeu_ps(to, v); }
QOMPOSE_INLINE Floats madd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
QOMPOSE_INLINE Floats load_some(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}
QOMPOSE_INLINE void store_some(float* to, Floats v, int64_t count) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), v);
}
QOMPOSE_INLINE Ints load_lanes(const uint8_t* from) { return _mm512_loadu_si512(from); }
QOMPOSE_INLINE Floats from_halves(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
QOMPOSE_INLINE Ints widened(const int8_t* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
QOMPOSE_INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
typedef uint32_t Unsigned __attribute__((vector_size(64)));
typedef int32_t Signed __attribute__((vector_size(64)));
QOMPOSE_INLINE Floats nibble(Ints lanes, int shift) {
  const Floats values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps((Ints)((Unsigned)lanes >> shift), values);
}
QOMPOSE_INLINE Floats byte_of(Ints lanes, int shift) {
  return to_floats((Ints)((Signed)((Unsigned)lanes << (24 - shift)) >> 24));
}
#ifdef __AVX512BW__
#define QOMPOSE_BYTES 1
QOMPOSE_INLINE Ints all_ints(int32_t value) { return _mm512_set1_epi32(value); }
QOMPOSE_INLINE Ints added(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
QOMPOSE_INLINE Ints multiplied(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
QOMPOSE_INLINE Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
QOMPOSE_INLINE Ints differing(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
template <int BITS>
QOMPOSE_INLINE Ints words_right(Ints x) {
  return _mm512_srli_epi16(x, BITS);
}
QOMPOSE_INLINE Ints pairs(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
QOMPOSE_INLINE Ints byte_pairs(Ints a, Ints b) { return _mm512_maddubs_epi16(a, b); }
QOMPOSE_INLINE Ints even_bytes(Ints x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
QOMPOSE_INLINE Ints odd_bytes(Ints x) { return _mm512_srai_epi16(x, 8); }
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#define QOMPOSE_BYTES 1
struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
#define QOMPOSE_HALVES(FUNCTION, A, B) {FUNCTION((A).low, (B).low), FUNCTION((A).high, (B).high)}
#define QOMPOSE_EACH_HALF(FUNCTION, A, ...) {FUNCTION((A).low, __VA_ARGS__), FUNCTION((A).high, __VA_ARGS__)}
QOMPOSE_INLINE Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
QOMPOSE_INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
QOMPOSE_INLINE void store(float* to, Floats v) {
  _mm256_storeu_ps(to, v.low);
  _mm256_storeu_ps(to + 8, v.high);
}
QOMPOSE_INLINE Floats madd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
QOMPOSE_INLINE Floats load_some(const float* from, int64_t count) {
  float values[LANES] = {};
  std::copy_n(from, count, values);
  return load(values);
}
QOMPOSE_INLINE void store_some(float* to, Floats v, int64_t count) {
  if (count == LANES) return store(to, v);
  float values[LANES];
  store(values, v);
  std::copy_n(values, count, to);
}
QOMPOSE_INLINE Ints load_lanes(const uint8_t* from) {
  const auto* vectors = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(vectors), _mm256_loadu_si256(vectors + 1)};
}
QOMPOSE_INLINE Floats from_halves(const uint16_t* from) {
  const auto* vectors = reinterpret_cast<const __m128i*>(from);
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(vectors)),
                high = _mm256_cvtepu16_epi32(_mm_loadu_si128(vectors + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
QOMPOSE_INLINE Ints widened(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
QOMPOSE_INLINE Floats to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
QOMPOSE_INLINE Ints all_ints(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
QOMPOSE_INLINE Ints added(Ints a, Ints b) { return QOMPOSE_HALVES(_mm256_add_epi32, a, b); }
QOMPOSE_INLINE Ints multiplied(Ints a, Ints b) { return QOMPOSE_HALVES(_mm256_mullo_epi32, a, b); }
QOMPOSE_INLINE Ints both(Ints a, Ints b) { return QOMPOSE_HALVES(_mm256_and_si256, a, b); }
QOMPOSE_INLINE Ints differing(Ints a, Ints b) { return QOMPOSE_HALVES(_mm256_xor_si256, a, b); }
template <int BITS>
QOMPOSE_INLINE Ints words_right(Ints x) {
  return QOMPOSE_EACH_HALF(_mm256_srli_epi16, x, BITS);
}
QOMPOSE_INLINE Ints pairs(Ints a, Ints b) { return QOMPOSE_HALVES(_mm256_madd_epi16, a, b); }
QOMPOSE_INLINE Ints byte_pairs(Ints a, Ints b) { return QOMPOSE_HALVES(_mm256_maddubs_epi16, a, b); }
QOMPOSE_INLINE Ints odd_bytes(Ints x) { return QOMPOSE_EACH_HALF(_mm256_srai_epi16, x, 8); }
QOMPOSE_INLINE Ints even_bytes(Ints x) {
  const Ints odd = QOMPOSE_EACH_HALF(_mm256_slli_epi16, x, 8);
  return odd_bytes(odd);
}
QOMPOSE_INLINE Floats nibble(Ints lanes, int shift) {
  const __m128i bits = _mm_cvtsi32_si128(shift);
  const Ints shifted = QOMPOSE_EACH_HALF(_mm256_srl_epi32, lanes, bits);
  return to_floats(added(both(shifted, all_ints(15)), all_ints(-8)));
}
QOMPOSE_INLINE Floats byte_of(Ints lanes, int shift) {
  const __m128i bits = _mm_cvtsi32_si128(24 - shift);
  const Ints top = QOMPOSE_EACH_HALF(_mm256_sll_epi32, lanes, bits);
  const Ints whole = QOMPOSE_EACH_HALF(_mm256_srai_epi32, top, 24);
  return to_floats(whole);
}
#else
struct Floats {
  float v[LANES];
};
struct Ints {
  int32_t v[LANES];
};
template <typename To, typename Function>
QOMPOSE_INLINE To each(Function function) {
  To result;
  for (int i = 0; i < LANES; ++i) result.v[i] = function(i);
  return result;
}
QOMPOSE_INLINE Floats all(float value) {
  return each<Floats>([&](int) { return value; });
}
QOMPOSE_INLINE Floats load(const float* from) {
  return each<Floats>([&](int i) { return from[i]; });
}
QOMPOSE_INLINE void store(float* to, const Floats& a) { std::memcpy(to, a.v, sizeof a.v); }
QOMPOSE_INLINE Floats madd(const Floats& a, const Floats& b, const Floats& c) {
  return each<Floats>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
QOMPOSE_INLINE Floats load_some(const float* from, int64_t count) {
  return each<Floats>([&](int i) { return i < count ? from[i] : 0.0f; });
}
QOMPOSE_INLINE void store_some(float* to, const Floats& a, int64_t count) {
  std::memcpy(to, a.v, sizeof(float) * count);
}
QOMPOSE_INLINE Ints load_lanes(const uint8_t* from) {
  Ints result;
  std::memcpy(result.v, from, sizeof result.v);
  return result;
}
QOMPOSE_INLINE Floats from_halves(const uint16_t* from) {
  const Ints bits = each<Ints>([&](int i) { return static_cast<int32_t>(uint32_t(from[i]) << 16); });
  Floats result;
  std::memcpy(result.v, bits.v, sizeof result.v);
  return result;
}
QOMPOSE_INLINE Ints widened(const int8_t* from) {
  return each<Ints>([&](int i) { return from[i]; });
}
QOMPOSE_INLINE Floats to_floats(const Ints& a) {
  return each<Floats>([&](int i) { return static_cast<float>(a.v[i]); });
}
QOMPOSE_INLINE Floats nibble(const Ints& a, int shift) {
  return each<Floats>([&](int i) { return static_cast<float>(((a.v[i] >> shift) & 15) - 8); });
}
QOMPOSE_INLINE Floats byte_of(const Ints& a, int shift) {
  return each<Floats>([&](int i) {
    return static_cast<float>(static_cast<int32_t>(uint32_t(a.v[i]) << (24 - shift)) >> 24);
  });
}
#endif

// Weight `i` of a unit, for all lanes, from its bytes. Of four bits: 4 bytes for each lane, whose low halves
// are inputs 0 to 3, and whose high halves 4 to 7, each 8 more than its value.
template <int BITS>
QOMPOSE_INLINE Floats value(const Ints* lanes, int i) {
  if constexpr (BITS == 4) return nibble(lanes[0], 8 * (i % 4) + 4 * (i / 4));
  return byte_of(lanes[i / 4], 8 * (i % 4));
}

QOMPOSE_INLINE Floats scale_of(const Linear& p, int64_t panel, int64_t g) {
  const int64_t at = (panel * p.groups() + g) * LANES;
  if (p.half_scales) return from_halves(static_cast<const uint16_t*>(p.scales) + at);
  return load(static_cast<const float*>(p.scales) + at);
}

QOMPOSE_INLINE Ints zero_points_of(const Linear& p, int64_t panel, int64_t g) {
  return widened(p.zero_points + (panel * p.groups() + g) * LANES);
}

// -- rows
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

// -- few rows, which are multiplied as they are
// Floats: weights are made floats in registers.
template <int BITS>
struct OfFloats {
  using Sum = Floats;
  static QOMPOSE_INLINE const float* inputs(const Rows& rows) { return rows.x; }

  // What the zero point of a group adds to the sums of a row.
  static QOMPOSE_INLINE Floats start(const Linear& p, const Rows& rows, int64_t m, int64_t panel, int64_t g) {
    if (!p.zero_points) return all(0);
    return madd(to_floats(zero_points_of(p, panel, g)), all(-rows.float_sums[m * p.groups() + g]), all(0));
  }
  static QOMPOSE_INLINE Floats real(Floats sum) { return sum; }

  template <int ROWS, int PANELS>
  static QOMPOSE_INLINE void add(const Ints* lanes, const float* const* x, int64_t k, int j,
                                 Floats (&sums)[ROWS][PANELS]) {
#pragma GCC unroll 16
    for (int i = 0; i < UNIT; ++i) {
      const Floats w = value<BITS>(lanes, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) sums[r][j] = madd(w, all(x[r][k + i]), sums[r][j]);
    }
  }
};

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

// Bytes: weights are made unsigned.
template <int BITS>
struct OfBytes {
  using Sum = Ints;
  static QOMPOSE_INLINE const int8_t* inputs(const Rows& rows) { return rows.integers.data(); }

  static QOMPOSE_INLINE Ints start(const Linear& p, const Rows& rows, int64_t m, int64_t panel, int64_t g) {
    Ints zero = all_ints(1 << (BITS - 1));  // the unsigned number of the weight 0
    if (p.zero_points) zero = added(zero, zero_points_of(p, panel, g));
    return multiplied(zero, all_ints(-rows.sums[m * p.groups() + g]));
  }
  static QOMPOSE_INLINE Floats real(Ints sum) { return to_floats(sum); }

  template <int ROWS, int PANELS>
  static QOMPOSE_INLINE void add(const Ints* lanes, const int8_t* const* x, int64_t k, int j,
                                 Ints (&sums)[ROWS][PANELS]) {
    Ints low = lanes[0], high;
    if constexpr (BITS == 4) {
      const Ints mask = all_ints(0x0f0f0f0f);
      high = both(words_right<4>(low), mask);
      low = both(low, mask);
    } else {
      const Ints sign = all_ints(static_cast<int32_t>(0x80808080));
      high = differing(lanes[1], sign);
      low = differing(low, sign);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      int32_t four[2];
      std::memcpy(four, x[r] + k, 8);
      sums[r][j] = dot<BITS>(sums[r][j], low, all_ints(four[0]));
      sums[r][j] = dot<BITS>(sums[r][j], high, all_ints(four[1]));
    }
  }
};
#else
template <int BITS>
using OfBytes = OfFloats<BITS>;  // never reached: see BYTES
#endif

template <int BITS, bool BY_BYTES, int ROWS, int PANELS>
void tile(const Linear& p, const Rows& rows, int64_t m, int64_t panel) {
  using Of = std::conditional_t<BY_BYTES, OfBytes<BITS>, OfFloats<BITS>>;
  Floats total[ROWS][PANELS];
  decltype(Of::inputs(rows)) x[ROWS];
  const uint8_t* weight[PANELS];
  for (int r = 0; r < ROWS; ++r) {
    x[r] = Of::inputs(rows) + (m + r) * p.depth;
    for (int j = 0; j < PANELS; ++j) total[r][j] = all(0);
  }
  for (int j = 0; j < PANELS; ++j) weight[j] = p.weight_at(panel + j, 0);
  // A row alone waits for memory: panels are as long as a page or two, which the processor's own fetching
  // ends with. Behind the last panel this asks for memory of others, which is only a hint.
  const int64_t next = PANELS * p.depth / UNIT * p.unit_bytes();
  for (int64_t g = 0; g < p.groups(); ++g) {
    typename Of::Sum sums[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < PANELS; ++j) sums[r][j] = Of::start(p, rows, m + r, panel + j, g);
    for (int64_t k = g * p.group; k < (g + 1) * p.group; k += UNIT) {
#pragma GCC unroll 16
      for (int j = 0; j < PANELS; ++j) {
        Ints lanes[BITS / 4];
        for (int i = 0; i < BITS / 4; ++i) {
          lanes[i] = load_lanes(weight[j] + 64 * i);
          if constexpr (ROWS == 1) __builtin_prefetch(weight[j] + next + 64 * i);
        }
        weight[j] += LANES * BITS;
        Of::add(lanes, x, k, j, sums);
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < PANELS; ++j) {
      const Floats scale = scale_of(p, panel + j, g);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) total[r][j] = madd(Of::real(sums[r][j]), scale, total[r][j]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < PANELS; ++j) finish(p, rows, m + r, panel + j, total[r][j]);
}

// -- many rows: a block of weights is made floats in the first cache
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
// -- many rows of bytes. Weights are unpacked once for all rows, as signed bytes less their zero points, and
// rows become unsigned: what that adds to a sum is the same for all rows.
constexpr int HIGH = 6;       // rows of a tile: its sums and totals are most of the registers
constexpr int QUAD = 4;       // bytes that are multiplied together
constexpr int FARTHEST = 16;  // zero points of four bits from 0, so that two products fit in 16 bits
template <int BITS>
constexpr int64_t MANY = (BITS == 4 ? 2 : 3) * HIGH;  // rows for which unpacking pays

#pragma GCC push_options
#pragma GCC optimize("O3,tree-loop-vectorize")
inline bool has_distant_zero_points(const Linear& p) {
  if (!p.zero_points || p.bits == 8) return p.zero_points;
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
  Scratch scratch(available * Panels::lines(any));
  for (const Linear& p : linears) {
    const int64_t pairs = (p.panels() + PAIR - 1) / PAIR;
    in_parallel(threads_for(p.rows * p.depth * p.channels, pairs, available), pairs,
                [&](int thread, int64_t from, int64_t to) {
                  const Panels panels(p, &scratch[thread * Panels::lines(p)]);
                  for (int64_t first = from * PAIR; first < to * PAIR; first += PAIR) {
                    unpack_bytes<BITS>(p, first, panels);
                    for (int64_t t = 0; t < tiles; ++t)
                      byte_tile<BITS>(p, rows, &x[t * size], panels, t * HIGH, first);
                  }
                });
  }
}
#endif

// Rows `m` to the last, by tiles of at most ROWS, then of fewer.
template <int BITS, bool BY_BYTES, int ROWS, int PANELS>
void rows_of(const Linear& p, const Rows& rows, int64_t m, int64_t panel) {
  for (; m + ROWS <= p.rows; m += ROWS) tile<BITS, BY_BYTES, ROWS, PANELS>(p, rows, m, panel);
  if constexpr (ROWS > 1)
    if (m < p.rows) rows_of<BITS, BY_BYTES, ROWS / 2, PANELS>(p, rows, m, panel);
}

constexpr int64_t FEW = 12;  // rows of floats for which unpacking to memory does not pay

// Some panels of few rows.
template <int BITS>
void panels_of(const Linear& p, const Rows& rows, bool bytes, int64_t panel, int64_t end) {
  while (panel < end) {
    if (p.rows == 1 && panel + 4 <= p.panels()) {
      bytes ? tile<BITS, true, 1, 4>(p, rows, 0, panel) : tile<BITS, false, 1, 4>(p, rows, 0, panel);
      panel += 4;
    } else if (panel + 2 <= p.panels()) {
      bytes ? rows_of<BITS, true, 8, 2>(p, rows, 0, panel) : rows_of<BITS, false, 4, 2>(p, rows, 0, panel);
      panel += 2;
    } else {
      bytes ? rows_of<BITS, true, 8, 1>(p, rows, 0, panel) : rows_of<BITS, false, 4, 1>(p, rows, 0, panel);
      panel += 1;
    }
  }
}

// Linears that read the same rows, and differ in what they make of them alone.
using Linears = std::vector<Linear>;

template <int BITS>
void multiply(const Linears& linears, const Rows& rows, int threads) {
  const Linear& any = linears.front();
  const bool bytes = BYTES && any.mode != FLOATS;
  if (!bytes && any.rows >= FEW) {
    for (const Linear& p : linears)
      many_rows<BITS>(p, rows, threads_for(p.rows * p.depth * p.channels, p.panels(), threads));
    return;
  }
#ifdef __AVX512BW__
  if (bytes && any.rows >= MANY<BITS> &&
      std::none_of(linears.begin(), linears.end(), has_distant_zero_points))
    return many_rows_of_bytes<BITS>(linears, rows, threads);
#endif
  const int64_t wide = any.rows == 1 ? 4 : 2;
  const auto parts_of = [&](const Linear& p) { return (p.panels() + wide - 1) / wide; };
  int64_t parts = 0, channels = 0;
  for (const Linear& p : linears) parts += parts_of(p), channels += p.channels;
  threads = threads_for(any.rows * any.depth * channels, parts, threads);
  in_parallel(threads, parts, [&](int, int64_t from, int64_t to) {
    for (const Linear& p : linears) {
      const int64_t own = parts_of(p);
      panels_of<BITS>(p, rows, bytes, from * wide, std::min(std::min(to, own) * wide, p.panels()));
      from = std::max<int64_t>(from - own, 0);
      to = std::max<int64_t>(to - own, 0);
    }
  });
}

// Compute linears of `given` inputs, the rest of whose last unit are 0. May throw std::bad_alloc.
inline void compute(const Linears& linears, const float* x, int64_t given, int threads) {
  const auto asks_most = [](const Linear& p) { return p.zero_points != nullptr; };
  const auto found = std::find_if(linears.begin(), linears.end(), asks_most);
  const Rows rows = prepared(found == linears.end() ? linears.front() : *found, x, given, threads);
  linears.front().bits == 4 ? multiply<4>(linears, rows, threads) : multiply<8>(linears, rows, threads);
}

}  // namespace packed
}  // namespace qompose_x86
