// SPDX-License-Identifier: Apache-2.0
// Vectors of LANES numbers of 32 bits, each of which may stand for four bytes, and the sums of products of
// bytes. Of a kernel written with it there is one for all instruction sets; packed_linear.h and attention.h
// have their own.
//
// The program says for which set it packed weights, and this file is compiled for no other:
//
//   QOMPOSE_AVX512_VNNI, QOMPOSE_AVX512   16 lanes
//   QOMPOSE_AVX_VNNI, QOMPOSE_AVX2         8 lanes
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "inlining.h"

#if defined(QOMPOSE_AVX512_VNNI) || defined(QOMPOSE_AVX512)
#define QOMPOSE_WIDE 1
#if !(defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__))
#error "weights are packed for AVX-512, for which this is not compiled"
#endif
#elif !(defined(__AVX2__) && defined(__FMA__))
#error "weights are packed for AVX2, for which this is not compiled"
#endif
#if (defined(QOMPOSE_AVX512_VNNI) && !defined(__AVX512VNNI__)) || \
    (defined(QOMPOSE_AVX_VNNI) && !defined(__AVXVNNI__))
#error "weights of eight bits are packed for VNNI, for which this is not compiled"
#endif

namespace qompose_x86 {

#ifdef QOMPOSE_WIDE
constexpr int LANES = 16;
using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;   // of a comparison
using First = __mmask16;  // the first so many lanes
using FirstBytes = __mmask64;

QOMPOSE_INLINE First first_lanes(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }
QOMPOSE_INLINE FirstBytes first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

QOMPOSE_INLINE Floats floats(float x) { return _mm512_set1_ps(x); }
QOMPOSE_INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
QOMPOSE_INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
QOMPOSE_INLINE Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
QOMPOSE_INLINE Floats load(First some, const float* from) { return _mm512_maskz_loadu_ps(some, from); }
QOMPOSE_INLINE Ints load_bytes(FirstBytes some, const void* from) {
  return _mm512_maskz_loadu_epi8(some, from);
}
QOMPOSE_INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
QOMPOSE_INLINE void store_ints(void* to, Ints x) { _mm512_storeu_si512(to, x); }
QOMPOSE_INLINE void store(First some, float* to, Floats x) { _mm512_mask_storeu_ps(to, some, x); }
QOMPOSE_INLINE void store_bytes(FirstBytes some, void* to, Ints x) {
  if (some == ~0ull) return store_ints(to, x);  // some processors are slow with a mask
  _mm512_mask_storeu_epi8(to, some, x);
}
// The lowest byte of each lane.
QOMPOSE_INLINE void store_lowest(void* to, Ints x) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}
QOMPOSE_INLINE __m256i half(Ints x, int number) {
  return number ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x);
}
QOMPOSE_INLINE void store_half(void* to, Ints x, int number) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), half(x, number));
}
// At most so many bytes of it.
QOMPOSE_INLINE void store_half(int64_t bytes, void* to, Ints x, int number) {
  _mm256_mask_storeu_epi8(to, static_cast<__mmask32>(first_bytes(bytes)), half(x, number));
}
// A vector of at most so many bytes, half a vector, from each of two places; zeros behind them.
QOMPOSE_INLINE Ints load_halves(int64_t bytes, const void* low, const void* high) {
  const auto some = static_cast<__mmask32>(first_bytes(bytes));
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(some, low)),
                            _mm256_maskz_loadu_epi8(some, high), 1);
}
// Quarters of a vector: a byte for each lane.
QOMPOSE_INLINE __m128i quarter(Ints x, int number) {
  switch (number) {
    case 0:
      return _mm512_castsi512_si128(x);
    case 1:
      return _mm512_extracti32x4_epi32(x, 1);
    case 2:
      return _mm512_extracti32x4_epi32(x, 2);
    default:
      return _mm512_extracti32x4_epi32(x, 3);
  }
}
QOMPOSE_INLINE void store_quarter(void* to, Ints x, int number) {
  _mm_storeu_si128(static_cast<__m128i*>(to), quarter(x, number));
}
QOMPOSE_INLINE void store_quarter(First some, void* to, Ints x, int number) {
  _mm_mask_storeu_epi8(to, some, quarter(x, number));
}
QOMPOSE_INLINE Ints widened_unsigned(First some, const void* from) {
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, from));
}
QOMPOSE_INLINE Ints widened_signed(First some, const void* from) {
  return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(some, from));
}

QOMPOSE_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
QOMPOSE_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
QOMPOSE_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
QOMPOSE_INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
QOMPOSE_INLINE Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
QOMPOSE_INLINE Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
// Where an operand is NaN, these two return the second.
QOMPOSE_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
QOMPOSE_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
QOMPOSE_INLINE Floats absolute(Floats x) { return _mm512_abs_ps(x); }
QOMPOSE_INLINE Floats rounded(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QOMPOSE_INLINE Floats truncated(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
// In each lane the one of sixteen floats that four bits of an integer tell.
QOMPOSE_INLINE Floats looked_up(const float* sixteen, Ints which) {
  return _mm512_permutexvar_ps(which, _mm512_loadu_ps(sixteen));
}
// x times two to a whole power that is that of a normal number.
QOMPOSE_INLINE Floats scaled(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }
QOMPOSE_INLINE Floats guessed_reciprocal(Floats x) { return _mm512_rcp14_ps(x); }
QOMPOSE_INLINE Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
QOMPOSE_INLINE Floats where(Mask condition, Floats a, Floats b) {
  return _mm512_mask_mov_ps(b, condition, a);
}
QOMPOSE_INLINE float sum_of_lanes(Floats x) { return _mm512_reduce_add_ps(x); }
QOMPOSE_INLINE float largest_lane(Floats x) { return _mm512_reduce_max_ps(x); }
QOMPOSE_INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
QOMPOSE_INLINE Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
QOMPOSE_INLINE Ints bits_of(Floats x) { return _mm512_castps_si512(x); }

QOMPOSE_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
QOMPOSE_INLINE Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
QOMPOSE_INLINE Ints largest(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
QOMPOSE_INLINE Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
QOMPOSE_INLINE Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
QOMPOSE_INLINE Ints shifted_right(Ints x, int bits) { return _mm512_sra_epi32(x, _mm_cvtsi32_si128(bits)); }
QOMPOSE_INLINE Ints shifted_left(Ints x, int bits) { return _mm512_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
QOMPOSE_INLINE Ints shuffled(Ints x, Ints within_16) { return _mm512_shuffle_epi8(x, within_16); }
QOMPOSE_INLINE Ints permuted(Ints x, Ints lanes) { return _mm512_permutexvar_epi32(lanes, x); }
QOMPOSE_INLINE Ints packed_words(Ints a, Ints b) { return _mm512_packs_epi32(a, b); }
// As many bytes as there are lanes, again and again.
QOMPOSE_INLINE Ints repeated(const void* from) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
// Words are of 16 bits.
QOMPOSE_INLINE Ints words(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
QOMPOSE_INLINE Ints added_words(Ints a, Ints b) { return _mm512_adds_epi16(a, b); }
QOMPOSE_INLINE Ints largest_words(Ints a, Ints b) { return _mm512_max_epi16(a, b); }
QOMPOSE_INLINE Ints packed_unsigned(Ints a, Ints b) { return _mm512_packus_epi16(a, b); }
QOMPOSE_INLINE Ints packed_signed(Ints a, Ints b) { return _mm512_packs_epi16(a, b); }
QOMPOSE_INLINE Ints low_bytes(Ints a, Ints b) { return _mm512_unpacklo_epi8(a, b); }
QOMPOSE_INLINE Ints high_bytes(Ints a, Ints b) { return _mm512_unpackhi_epi8(a, b); }
QOMPOSE_INLINE Ints low_words(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
QOMPOSE_INLINE Ints high_words(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }
// Packing works within 128 bits: this puts the groups of four bytes of each packed vector side by side again.
QOMPOSE_INLINE Ints in_order(Ints packed) {
  return permuted(packed, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

#else

constexpr int LANES = 8;
using Floats = __m256;
using Ints = __m256i;
using Mask = __m256;
struct First {
  __m256i lanes;
  int64_t count;
};
using FirstBytes = int64_t;

QOMPOSE_INLINE First first_lanes(int64_t count) {
  const int64_t some = count < 8 ? count : 8;
  const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(some)), number), some};
}
QOMPOSE_INLINE FirstBytes first_bytes(int64_t count) { return count < 32 ? count : 32; }

QOMPOSE_INLINE Floats floats(float x) { return _mm256_set1_ps(x); }
QOMPOSE_INLINE Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
QOMPOSE_INLINE Floats load(const float* from) { return _mm256_loadu_ps(from); }
QOMPOSE_INLINE Ints load_ints(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
QOMPOSE_INLINE Floats load(First some, const float* from) { return _mm256_maskload_ps(from, some.lanes); }
QOMPOSE_INLINE Ints load_bytes(FirstBytes some, const void* from) {
  const auto* bytes = static_cast<const unsigned char*>(from);
  const __m256i x = _mm256_maskload_epi32(static_cast<const int*>(from), first_lanes(some / 4).lanes);
  if (some % 4 == 0) return x;
  uint32_t last = 0;
  std::memcpy(&last, bytes + some / 4 * 4, some % 4);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), all = _mm256_set1_epi32(last);
  return _mm256_blendv_epi8(x, all, _mm256_cmpeq_epi32(lane, _mm256_set1_epi32(some / 4)));
}
QOMPOSE_INLINE void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
QOMPOSE_INLINE void store_ints(void* to, Ints x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
QOMPOSE_INLINE void store(First some, float* to, Floats x) { _mm256_maskstore_ps(to, some.lanes, x); }
QOMPOSE_INLINE void store_bytes(FirstBytes some, void* to, Ints x) {
  if (some == 32) return store_ints(to, x);
  auto* bytes = static_cast<char*>(to);
  __m128i half = _mm256_castsi256_si128(x);
  if (some & 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), half);
    half = _mm256_extracti128_si256(x, 1);
    bytes += 16;
  }
  if (some & 8) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes), half);
    half = _mm_srli_si128(half, 8);
    bytes += 8;
  }
  const int64_t rest = _mm_cvtsi128_si64(half);
  std::memcpy(bytes, &rest, some & 7);
}
// The lowest byte of each lane.
QOMPOSE_INLINE void store_lowest(void* to, Ints x) {
  const __m256i picked = _mm256_shuffle_epi8(x, _mm256_set1_epi32(0x0c080400));
  const __m128i low = _mm256_castsi256_si128(picked), high = _mm256_extracti128_si256(picked, 1);
  const int64_t bytes = _mm_cvtsi128_si64(_mm_unpacklo_epi32(low, high));
  std::memcpy(to, &bytes, 8);
}
QOMPOSE_INLINE void store_half(void* to, Ints x, int number) {
  const __m128i half = number ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x);
  _mm_storeu_si128(static_cast<__m128i*>(to), half);
}
// At most so many bytes of it.
QOMPOSE_INLINE void store_half(int64_t bytes, void* to, Ints x, int number) {
  char half[16];
  store_half(half, x, number);
  std::memcpy(to, half, bytes < 16 ? bytes : 16);
}
// A vector of at most so many bytes, half a vector, from each of two places; zeros behind them.
QOMPOSE_INLINE Ints load_halves(int64_t bytes, const void* low, const void* high) {
  if (bytes >= 16)
    return _mm256_loadu2_m128i(static_cast<const __m128i*>(high), static_cast<const __m128i*>(low));
  char halves[32] = {};
  std::memcpy(halves, low, bytes);
  std::memcpy(halves + 16, high, bytes);
  return load_ints(halves);
}
// Quarters of a vector: a byte for each lane.
QOMPOSE_INLINE int64_t quarter(Ints x, int number) {
  const __m128i half = number < 2 ? _mm256_castsi256_si128(x) : _mm256_extracti128_si256(x, 1);
  return number % 2 ? _mm_extract_epi64(half, 1) : _mm_cvtsi128_si64(half);
}
QOMPOSE_INLINE void store_quarter(void* to, Ints x, int number) {
  const int64_t bytes = quarter(x, number);
  std::memcpy(to, &bytes, 8);
}
QOMPOSE_INLINE void store_quarter(First some, void* to, Ints x, int number) {
  const int64_t bytes = quarter(x, number);
  std::memcpy(to, &bytes, some.count);
}
QOMPOSE_INLINE __m128i eight_bytes(First some, const void* from) {
  int64_t bytes = 0;
  if (some.count == 8)
    std::memcpy(&bytes, from, 8);
  else
    std::memcpy(&bytes, from, some.count);
  return _mm_cvtsi64_si128(bytes);
}
QOMPOSE_INLINE Ints widened_unsigned(First some, const void* from) {
  return _mm256_cvtepu8_epi32(eight_bytes(some, from));
}
QOMPOSE_INLINE Ints widened_signed(First some, const void* from) {
  return _mm256_cvtepi8_epi32(eight_bytes(some, from));
}

QOMPOSE_INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
QOMPOSE_INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
QOMPOSE_INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
QOMPOSE_INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
QOMPOSE_INLINE Floats fmsub(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
QOMPOSE_INLINE Floats fnmadd(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
// Where an operand is NaN, these two return the second.
QOMPOSE_INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
QOMPOSE_INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
QOMPOSE_INLINE Floats absolute(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
QOMPOSE_INLINE Floats rounded(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QOMPOSE_INLINE Floats truncated(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
// In each lane the one of sixteen floats that four bits of an integer tell.
QOMPOSE_INLINE Floats looked_up(const float* sixteen, Ints which) {
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(sixteen), which),
               high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(sixteen + 8), which);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(which, 28)));
}
QOMPOSE_INLINE float sum_of_lanes(Floats x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)),
               two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
QOMPOSE_INLINE float largest_lane(Floats x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)),
               two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
QOMPOSE_INLINE Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
QOMPOSE_INLINE Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
QOMPOSE_INLINE Ints bits_of(Floats x) { return _mm256_castps_si256(x); }
// x times two to a whole power that is that of a normal number.
QOMPOSE_INLINE Floats scaled(Floats x, Floats power) {
  const __m256i exponent = _mm256_add_epi32(to_ints(power), _mm256_set1_epi32(127));
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
QOMPOSE_INLINE Floats guessed_reciprocal(Floats x) { return _mm256_rcp_ps(x); }
QOMPOSE_INLINE Mask less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
QOMPOSE_INLINE Floats where(Mask condition, Floats a, Floats b) { return _mm256_blendv_ps(b, a, condition); }

QOMPOSE_INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
QOMPOSE_INLINE Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
QOMPOSE_INLINE Ints largest(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
QOMPOSE_INLINE Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
QOMPOSE_INLINE Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
QOMPOSE_INLINE Ints shifted_right(Ints x, int bits) { return _mm256_sra_epi32(x, _mm_cvtsi32_si128(bits)); }
QOMPOSE_INLINE Ints shifted_left(Ints x, int bits) { return _mm256_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
QOMPOSE_INLINE Ints shuffled(Ints x, Ints within_16) { return _mm256_shuffle_epi8(x, within_16); }
QOMPOSE_INLINE Ints permuted(Ints x, Ints lanes) { return _mm256_permutevar8x32_epi32(x, lanes); }
QOMPOSE_INLINE Ints packed_words(Ints a, Ints b) { return _mm256_packs_epi32(a, b); }
// As many bytes as there are lanes, again and again.
QOMPOSE_INLINE Ints repeated(const void* from) {
  return _mm256_broadcastq_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
}
// Words are of 16 bits.
QOMPOSE_INLINE Ints words(int x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); }
QOMPOSE_INLINE Ints added_words(Ints a, Ints b) { return _mm256_adds_epi16(a, b); }
QOMPOSE_INLINE Ints largest_words(Ints a, Ints b) { return _mm256_max_epi16(a, b); }
QOMPOSE_INLINE Ints packed_unsigned(Ints a, Ints b) { return _mm256_packus_epi16(a, b); }
QOMPOSE_INLINE Ints packed_signed(Ints a, Ints b) { return _mm256_packs_epi16(a, b); }
QOMPOSE_INLINE Ints low_bytes(Ints a, Ints b) { return _mm256_unpacklo_epi8(a, b); }
QOMPOSE_INLINE Ints high_bytes(Ints a, Ints b) { return _mm256_unpackhi_epi8(a, b); }
QOMPOSE_INLINE Ints low_words(Ints a, Ints b) { return _mm256_unpacklo_epi16(a, b); }
QOMPOSE_INLINE Ints high_words(Ints a, Ints b) { return _mm256_unpackhi_epi16(a, b); }
// Packing works within 128 bits: this puts the groups of four bytes of each packed vector side by side again.
QOMPOSE_INLINE Ints in_order(Ints packed) {
  return permuted(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// Add to each lane the products of its four unsigned and four signed bytes. Without VNNI, two products are
// added in 16 bits: signed bytes must be in -64..63, of which two products with 255 fit.
QOMPOSE_INLINE Ints dot(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
#if defined(QOMPOSE_AVX512_VNNI)
  return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
#elif defined(QOMPOSE_AVX512)
  const Ints pairs = _mm512_maddubs_epi16(unsigned_bytes, signed_bytes);
  return add(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(QOMPOSE_AVX_VNNI)
  return _mm256_dpbusd_avx_epi32(sum, unsigned_bytes, signed_bytes);
#else
  const Ints pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
  return add(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

}  // namespace qompose_x86
