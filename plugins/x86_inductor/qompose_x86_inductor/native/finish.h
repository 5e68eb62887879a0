// SPDX-License-Identifier: Apache-2.0
// What follows the integer sums of a product: scale, bias, another tensor, a function, integers again.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace qompose_x86 {

enum Function : int { NONE, HARDSWISH, SWISH, GELU_ERF, GELU_TANH, TANH, LEAKY_RELU };
enum Kind : int { UINT8, INT8, FLOAT32 };

// value = function(sum * scale + bias + (other - other_zp) * other_scale) * per_step, kept in low..high,
// rounded half to even, plus zp. Where there is no function, the scales are in steps of the result.
struct Finish {
  const int32_t* start;  // what sums begin with: minus the share of the zero point of x
  const float* scale;
  const float* bias;
  const void* other;  // laid out as the result; null if there is none
  Kind other_kind;
  float other_scale, other_zp;
  Function function;
  float slope, per_step, low, high;
  int zp;
  Kind kind;
  int64_t channels;  // of the result
};

#define QOMPOSE_INLINE __attribute__((always_inline)) inline

// 2 ** n * polynomial, by Taylor's series of 2 ** f on -0.5 .. 0.5: relative error below 3e-7. Arguments are
// kept where it is a normal number; NaN stays NaN, as the second operand of these.
QOMPOSE_INLINE __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(87), _mm512_max_ps(_mm512_set1_ps(-87), x));
  const __m512 powers = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(powers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_mul_ps(_mm512_sub_ps(powers, whole), _mm512_set1_ps(0.693147181f));
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
  return _mm512_scalef_ps(sum, whole);
}

// 1 / x of finite numbers: a step of Newton's method after 14 bits.
QOMPOSE_INLINE __m512 reciprocal(__m512 x) {
  const __m512 guess = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(guess, _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(2)));
}

// 0 where it is below 1e-37, so that what it multiplies may be any number; NaN stays NaN.
QOMPOSE_INLINE __m512 logistic(__m512 x) {
  const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-86), _CMP_NLT_UQ);
  const __m512 power = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_maskz_mov_ps(above, reciprocal(_mm512_add_ps(_mm512_set1_ps(1), power)));
}

// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: absolute error below 1.5e-7.
QOMPOSE_INLINE __m512 error_function(__m512 x) {
  const __m512 one = _mm512_set1_ps(1), size = _mm512_min_ps(_mm512_set1_ps(1000), _mm512_abs_ps(x));
  const __m512 t = reciprocal(_mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
  __m512 sum = _mm512_set1_ps(1.061405429f);
  for (const float term : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(term));
  const __m512 tail = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(size, size)));
  const __m512 result = _mm512_fnmadd_ps(_mm512_mul_ps(sum, t), tail, one);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_mask_sub_ps(result, negative, _mm512_setzero_ps(), result);
}

template <Function F>
QOMPOSE_INLINE __m512 apply(__m512 x, float slope) {
  const __m512 half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1), zero = _mm512_setzero_ps();
  switch (F) {
    case HARDSWISH: {
      const __m512 share = _mm512_fmadd_ps(x, _mm512_set1_ps(1.0f / 6), half);
      return _mm512_mul_ps(x, _mm512_min_ps(_mm512_max_ps(share, zero), one));
    }
    case SWISH:
      return _mm512_mul_ps(x, logistic(x));
    case GELU_ERF: {
      const __m512 share = error_function(_mm512_mul_ps(x, _mm512_set1_ps(0.707106781f)));
      return _mm512_mul_ps(x, _mm512_fmadd_ps(share, half, half));
    }
    case GELU_TANH: {  // (1 + tanh(z)) / 2 is the logistic function of 2 z
      const __m512 cube =
          _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.0713548163f), _mm512_set1_ps(1.59576912f));
      return _mm512_mul_ps(x, logistic(_mm512_mul_ps(x, cube)));
    }
    case TANH:
      return _mm512_fmsub_ps(_mm512_set1_ps(2), logistic(_mm512_add_ps(x, x)), one);
    case LEAKY_RELU:
      return _mm512_mask_mul_ps(x, _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), x, _mm512_set1_ps(slope));
    default:
      return x;
  }
}

QOMPOSE_INLINE __m512 other_values(const Finish& f, __mmask16 mask, int64_t at) {
  if (f.other_kind == FLOAT32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(f.other) + at);
  const __m128i bytes = _mm_maskz_loadu_epi8(mask, static_cast<const char*>(f.other) + at);
  const __m512i steps = f.other_kind == UINT8 ? _mm512_cvtepu8_epi32(bytes) : _mm512_cvtepi8_epi32(bytes);
  return _mm512_sub_ps(_mm512_cvtepi32_ps(steps), _mm512_set1_ps(f.other_zp));
}

// Where one operand is NaN, minimum and maximum give the second: a float stays NaN, an integer is the lowest.
template <Function F, bool INTEGERS>
QOMPOSE_INLINE __m512 bounded(const Finish& f, __m512 value) {
  if (F != NONE) value = _mm512_mul_ps(apply<F>(value, f.slope), _mm512_set1_ps(f.per_step));
  const __m512 low = _mm512_set1_ps(f.low);
  value = INTEGERS ? _mm512_max_ps(value, low) : _mm512_max_ps(low, value);
  return _mm512_min_ps(_mm512_set1_ps(f.high), value);
}

QOMPOSE_INLINE __m512i steps_of(const Finish& f, __m512 value) {
  return _mm512_add_epi32(_mm512_cvtps_epi32(value), _mm512_set1_epi32(f.zp));
}

template <Function F, bool ADD, bool INTEGERS>
QOMPOSE_INLINE __m512 value_of(const Finish& f, __m512i sum, __m512 scale, __m512 bias, __mmask16 mask,
                               int64_t at) {
  __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, bias);
  if (ADD) value = _mm512_fmadd_ps(other_values(f, mask, at), _mm512_set1_ps(f.other_scale), value);
  return bounded<F, INTEGERS>(f, value);
}

// 64 channels that become integers.
template <Function F, bool ADD>
void finish_whole(const Finish& f, const __m512i* sums, int rows, int64_t row, int64_t channel,
                  uint8_t* out) {
  // Packing works within 128 bits: this puts the four lanes of each vector side by side again.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512 scale[4], bias[4];
  for (int j = 0; j < 4; ++j) {
    scale[j] = _mm512_loadu_ps(f.scale + channel + 16 * j);
    bias[j] = _mm512_loadu_ps(f.bias + channel + 16 * j);
  }
  int64_t at = row * f.channels + channel;
  for (int r = 0; r < rows; ++r, at += f.channels, sums += 4) {
    __m512i steps[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      steps[j] = steps_of(f, value_of<F, ADD, true>(f, sums[j], scale[j], bias[j], 0xffff, at + 16 * j));
    const __m512i low = _mm512_packs_epi32(steps[0], steps[1]), high = _mm512_packs_epi32(steps[2], steps[3]);
    const __m512i bytes = f.kind == UINT8 ? _mm512_packus_epi16(low, high) : _mm512_packs_epi16(low, high);
    _mm512_storeu_si512(out + at, _mm512_permutexvar_epi32(order, bytes));
  }
}

// Sums of `rows` rows of `width` vectors, to rows of the result from `row` on, at `channel`.
template <Function F, bool ADD, bool INTEGERS>
void finish_tile(const Finish& shared, const __m512i* sums, int rows, int width, int64_t row, int64_t channel,
                 void* out) {
  const Finish f = shared;  // a copy that writing to `out` cannot change, so that it stays in registers
  if (INTEGERS && width == 4 && f.channels - channel >= 64)
    return finish_whole<F, ADD>(f, sums, rows, row, channel, static_cast<uint8_t*>(out));
  for (int j = 0; j < width; ++j, channel += 16) {
    const int64_t left = f.channels - channel;
    if (left <= 0) return;
    const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
    const __m512 scale = _mm512_loadu_ps(f.scale + channel), bias = _mm512_loadu_ps(f.bias + channel);
    int64_t at = row * f.channels + channel;
    for (int r = 0; r < rows; ++r, at += f.channels) {
      const __m512 value = value_of<F, ADD, INTEGERS>(f, sums[r * width + j], scale, bias, mask, at);
      if (!INTEGERS && left >= 16)
        _mm512_storeu_ps(static_cast<float*>(out) + at, value);
      else if (!INTEGERS)
        _mm512_mask_storeu_ps(static_cast<float*>(out) + at, mask, value);
      else if (left >= 16)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<char*>(out) + at),
                         _mm512_cvtepi32_epi8(steps_of(f, value)));
      else
        _mm_mask_storeu_epi8(static_cast<char*>(out) + at, mask, _mm512_cvtepi32_epi8(steps_of(f, value)));
    }
  }
}

using FinishTile = void (*)(const Finish&, const __m512i*, int, int, int64_t, int64_t, void*);

template <Function F>
FinishTile finish_of(bool add, bool integers) {
  if (add) return integers ? finish_tile<F, true, true> : finish_tile<F, true, false>;
  return integers ? finish_tile<F, false, true> : finish_tile<F, false, false>;
}

inline FinishTile finish_of(const Finish& f) {
  const bool add = f.other != nullptr, integers = f.kind != FLOAT32;
  switch (f.function) {
    case HARDSWISH:
      return finish_of<HARDSWISH>(add, integers);
    case SWISH:
      return finish_of<SWISH>(add, integers);
    case GELU_ERF:
      return finish_of<GELU_ERF>(add, integers);
    case GELU_TANH:
      return finish_of<GELU_TANH>(add, integers);
    case TANH:
      return finish_of<TANH>(add, integers);
    case LEAKY_RELU:
      return finish_of<LEAKY_RELU>(add, integers);
    default:
      return finish_of<NONE>(add, integers);
  }
}

}  // namespace qompose_x86
