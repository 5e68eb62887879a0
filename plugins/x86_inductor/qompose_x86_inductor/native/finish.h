// SPDX-License-Identifier: Apache-2.0
// What follows the integer sums of a product: scale, bias, another tensor, a function, integers again.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "lanes.h"

namespace qompose_x86 {

enum Function : int { NONE, HARDSWISH, SWISH, GELU_ERF, GELU_TANH, TANH, LEAKY_RELU };
enum Kind : int { UINT8, INT8, FLOAT32 };

// A bit for each function that a program needs, since compilers take most of their time for these.
#ifndef QOMPOSE_FUNCTIONS
#define QOMPOSE_FUNCTIONS ~0u
#endif
template <Function F>
constexpr bool NEEDED = ((QOMPOSE_FUNCTIONS) >> F & 1) != 0;

[[noreturn]] inline void lacks_function() {
  throw std::logic_error("the program was compiled without a function that it needs");
}

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

// 2 ** n * polynomial, by Taylor's series of 2 ** f on -0.5 .. 0.5: relative error below 3e-7. Arguments are
// kept where it is a normal number; NaN stays NaN, as the second operand of these.
QOMPOSE_INLINE Floats exponential(Floats x) {
  x = min(floats(87), max(floats(-87), x));
  const Floats whole = rounded(mul(x, floats(1.44269504f)));
  // ln 2 in two parts, the first of few bits, so that the difference is exact.
  const Floats rest = fnmadd(whole, floats(-2.12194440e-4f), fnmadd(whole, floats(0.693359375f), x));
  Floats sum = floats(1.0f / 720);
  for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = fmadd(sum, rest, floats(term));
  return scaled(sum, whole);
}

// 1 / x of finite numbers: a step of Newton's method after 11 bits or more.
QOMPOSE_INLINE Floats reciprocal(Floats x) {
  const Floats guess = guessed_reciprocal(x);
  return mul(guess, fnmadd(x, guess, floats(2)));
}

// 0 where it is below 1e-37, so that what it multiplies may be any number; NaN stays NaN.
QOMPOSE_INLINE Floats logistic(Floats x) {
  const Floats share = reciprocal(add(floats(1), exponential(sub(floats(0), x))));
  return where(less(x, floats(-86)), floats(0), share);
}

// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: absolute error below 1.5e-7.
QOMPOSE_INLINE Floats error_function(Floats x) {
  const Floats one = floats(1), size = min(floats(1000), absolute(x));
  const Floats t = reciprocal(fmadd(size, floats(0.3275911f), one));
  Floats sum = floats(1.061405429f);
  for (const float term : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
    sum = fmadd(sum, t, floats(term));
  const Floats tail = exponential(sub(floats(0), mul(size, size)));
  const Floats result = fnmadd(mul(sum, t), tail, one);
  return where(less(x, floats(0)), sub(floats(0), result), result);
}

template <Function F>
QOMPOSE_INLINE Floats apply(Floats x, float slope) {
  const Floats half = floats(0.5f), one = floats(1), zero = floats(0);
  switch (F) {
    case HARDSWISH:
      return mul(x, min(max(fmadd(x, floats(1.0f / 6), half), zero), one));
    case SWISH:
      return mul(x, logistic(x));
    case GELU_ERF:
      return mul(x, fmadd(error_function(mul(x, floats(0.707106781f))), half, half));
    case GELU_TANH: {  // (1 + tanh(z)) / 2 is the logistic function of 2 z
      const Floats cube = fmadd(mul(x, x), floats(0.0713548163f), floats(1.59576912f));
      return mul(x, logistic(mul(x, cube)));
    }
    case TANH:
      return fmsub(floats(2), logistic(add(x, x)), one);
    case LEAKY_RELU:
      return where(less(x, zero), mul(x, floats(slope)), x);
    default:
      return x;
  }
}

QOMPOSE_INLINE Floats other_values(const Finish& f, First some, int64_t at) {
  if (f.other_kind == FLOAT32) return load(some, static_cast<const float*>(f.other) + at);
  const char* from = static_cast<const char*>(f.other) + at;
  const Ints steps = f.other_kind == UINT8 ? widened_unsigned(some, from) : widened_signed(some, from);
  return sub(to_floats(steps), floats(f.other_zp));
}

// Where one operand is NaN, minimum and maximum give the second: a float stays NaN, an integer is the lowest.
template <Function F, bool INTEGERS>
QOMPOSE_INLINE Floats bounded(const Finish& f, Floats value) {
  if (F != NONE) value = mul(apply<F>(value, f.slope), floats(f.per_step));
  const Floats low = floats(f.low);
  value = INTEGERS ? max(value, low) : max(low, value);
  return min(floats(f.high), value);
}

QOMPOSE_INLINE Ints steps_of(const Finish& f, Floats value) { return add(to_ints(value), ints(f.zp)); }

// Of four vectors of integers.
QOMPOSE_INLINE Ints bytes_of(Kind kind, const Ints* steps) {
  const Ints low = packed_words(steps[0], steps[1]), high = packed_words(steps[2], steps[3]);
  return kind == UINT8 ? packed_unsigned(low, high) : packed_signed(low, high);
}

template <Function F, bool ADD, bool INTEGERS>
QOMPOSE_INLINE Floats value_of(const Finish& f, Ints sum, Floats scale, Floats bias, First some, int64_t at) {
  Floats value = fmadd(to_floats(sum), scale, bias);
  if (ADD) value = fmadd(other_values(f, some, at), floats(f.other_scale), value);
  return bounded<F, INTEGERS>(f, value);
}

// Four whole vectors of channels that become integers.
template <Function F, bool ADD>
void finish_whole(const Finish& f, const Ints* sums, int rows, int64_t row, int64_t channel, uint8_t* out) {
  Floats scale[4], bias[4];
  for (int j = 0; j < 4; ++j) {
    scale[j] = load(f.scale + channel + LANES * j);
    bias[j] = load(f.bias + channel + LANES * j);
  }
  int64_t at = row * f.channels + channel;
  for (int r = 0; r < rows; ++r, at += f.channels, sums += 4) {
    Ints steps[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      steps[j] = steps_of(
          f, value_of<F, ADD, true>(f, sums[j], scale[j], bias[j], first_lanes(LANES), at + LANES * j));
    store_ints(out + at, in_order(bytes_of(f.kind, steps)));
  }
}

// Sums of `rows` rows of `width` vectors, to rows of the result from `row` on, at `channel`.
template <Function F, bool ADD, bool INTEGERS>
void finish_tile(const Finish& shared, const Ints* sums, int rows, int width, int64_t row, int64_t channel,
                 void* out) {
  const Finish f = shared;  // a copy that writing to `out` cannot change, so that it stays in registers
  if (INTEGERS && width == 4 && f.channels - channel >= 4 * LANES)
    return finish_whole<F, ADD>(f, sums, rows, row, channel, static_cast<uint8_t*>(out));
  for (int j = 0; j < width; ++j, channel += LANES) {
    const int64_t left = f.channels - channel;
    if (left <= 0) return;
    const First some = first_lanes(left);
    const Floats scale = load(f.scale + channel), bias = load(f.bias + channel);
    int64_t at = row * f.channels + channel;
    for (int r = 0; r < rows; ++r, at += f.channels) {
      const Floats value = value_of<F, ADD, INTEGERS>(f, sums[r * width + j], scale, bias, some, at);
      if (!INTEGERS && left >= LANES)
        store(static_cast<float*>(out) + at, value);
      else if (!INTEGERS)
        store(some, static_cast<float*>(out) + at, value);
      else if (left >= LANES)
        store_lowest(static_cast<char*>(out) + at, steps_of(f, value));
      else
        store_lowest(some, static_cast<char*>(out) + at, steps_of(f, value));
    }
  }
}

using FinishTile = void (*)(const Finish&, const Ints*, int, int, int64_t, int64_t, void*);

template <Function F>
FinishTile finish_of(bool add, bool integers) {
  if constexpr (!NEEDED<F>) {
    lacks_function();
  } else {
    if (add) return integers ? finish_tile<F, true, true> : finish_tile<F, true, false>;
    return integers ? finish_tile<F, false, true> : finish_tile<F, false, false>;
  }
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
