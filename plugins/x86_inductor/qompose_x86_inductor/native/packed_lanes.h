// SPDX-License-Identifier: Apache-2.0
// Sixteen numbers, and the weights of four or eight bits that become such, with and without instructions for
// them. lanes.h has as many as a register holds, which packed weights do not depend on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "inlining.h"
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qompose_x86 {
namespace packed {

constexpr int LANES = 16;  // output channels of a panel
constexpr int UNIT = 8;    // inputs that are packed together

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

}  // namespace packed
}  // namespace qompose_x86
