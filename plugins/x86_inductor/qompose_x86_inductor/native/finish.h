// SPDX-License-Identifier: Apache-2.0
// What follows the integer sums of a product: scale, bias, another tensor, a function, integers again.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "lanes.h"

namespace qompose_x86 {

enum Function : int { NONE, HARDSWISH, SWISH, GELU_ERF, GELU_TANH, TANH, LEAKY_RELU };
enum Kind : int { UINT8, INT8, FLOAT32 };

constexpr int64_t size_of(Kind kind) { return kind == FLOAT32 ? 4 : 1; }

// A bit for each function that a program needs, since compilers take most of their time for these.
#ifndef QOMPOSE_FUNCTIONS
#define QOMPOSE_FUNCTIONS ~0u
#endif

template <class Result, Function F, class Make>
Result made_with(const Make& make) {
  if constexpr (((QOMPOSE_FUNCTIONS) >> F & 1) != 0)
    return make(std::integral_constant<Function, F>());
  else
    throw std::logic_error("the program was compiled without a function that it needs");
}

// What `make` returns for a function, which it is given as a constant. Nothing is compiled for functions that
// no product of the program has.
template <class Result, class Make>
Result with_function(Function function, const Make& make) {
  switch (function) {
    case HARDSWISH:
      return made_with<Result, HARDSWISH>(make);
    case SWISH:
      return made_with<Result, SWISH>(make);
    case GELU_ERF:
      return made_with<Result, GELU_ERF>(make);
    case GELU_TANH:
      return made_with<Result, GELU_TANH>(make);
    case TANH:
      return made_with<Result, TANH>(make);
    case LEAKY_RELU:
      return made_with<Result, LEAKY_RELU>(make);
    default:
      return made_with<Result, NONE>(make);
  }
}

// value = function(sum * scale + bias + (other - other_zp) * other_scale) * per_step, kept in low..high,
// rounded half to even, plus zp. Where there is no function, the scales are in steps of the result, and there
// is no per_step.
struct Finish {
  const int32_t* start;  // what sums begin with: minus the share of the zero point of x
  const float* scale;
  const float* bias;
  const float* per_step;
  const void* other;  // laid out as the result; null if there is none
  Kind other_kind;
  float other_scale, other_zp;
  Function function;
  float slope, low, high;
  int zp;
  Kind kind;
  int64_t channels;  // of the result
  int lowest;        // of its integers
  bool prefetch;     // whether its memory is asked for before sums are computed
};

// What rounding the lower bound gives, as far as the result has it.
inline int lowest_of(float low, int zp, Kind kind) {
  if (kind == FLOAT32) return 0;
  const int least = kind == INT8 ? -128 : 0;
  return static_cast<int>(std::nearbyint(std::max(low, static_cast<float>(least - zp)))) + zp;
}

// 2 ** n * polynomial, by Taylor's series of 2 ** f on -0.5 .. 0.5: relative error below 3e-7. Arguments are
// kept where it is a normal number; NaN stays NaN, as the second operand of these.
QOMPOSE_INLINE Floats exponential(Floats x) {
  x = min(floats(87), max(floats(-87), x));
  const Floats whole = rounded(mul(x, floats(1.44269504f)));
  // ln 2 in two parts, the first of few bits, so that the difference is exact.
  const Floats rest = fnmadd(whole, floats(-2.12194440e-4f), fnmadd(whole, floats(0.693359375f), x));
  Floats sum = fmadd(floats(1.0f / 720), rest, floats(1.0f / 120));
  sum = fmadd(sum, rest, floats(1.0f / 24));
  sum = fmadd(sum, rest, floats(1.0f / 6));
  sum = fmadd(sum, rest, floats(0.5f));
  sum = fmadd(sum, rest, floats(1));
  return scaled(fmadd(sum, rest, floats(1)), whole);
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

// Phi(-a), how often a normally distributed number is below -a, on sixteen parts of 0 .. END: on each the
// polynomial of fourth degree that is exact at five points, by powers of the place in the part, 0 .. 1. Or
// its like by tanh, logistic(-2 z(a)). Off by less than 2e-7.
struct Tails {
  static constexpr int PARTS = 16, POINTS = 5;
  static constexpr double END = 5.5;
  float factors[POINTS][PARTS];

  explicit Tails(double (*tail)(double)) {
    for (int part = 0; part < PARTS; ++part) {
      double at[POINTS], sums[POINTS], powers[POINTS] = {};
      for (int i = 0; i < POINTS; ++i) {  // Chebyshev's points keep the error even
        at[i] = 0.5 - 0.5 * std::cos((i + 0.5) / POINTS * 3.14159265358979);
        sums[i] = tail((part + at[i]) * END / PARTS);
      }
      for (int i = 1; i < POINTS; ++i)  // Newton's divided differences
        for (int j = POINTS - 1; j >= i; --j) sums[j] = (sums[j] - sums[j - 1]) / (at[j] - at[j - i]);
      for (int i = POINTS - 1; i >= 0; --i) {
        for (int j = POINTS - 1; j > 0; --j) powers[j] = powers[j - 1] - at[i] * powers[j];
        powers[0] = sums[i] - at[i] * powers[0];
      }
      for (int i = 0; i < POINTS; ++i) factors[i][part] = static_cast<float>(powers[i]);
    }
  }

  // Of 0 <= a < END.
  QOMPOSE_INLINE Floats operator()(Floats a) const {
    const Floats part = mul(a, floats(static_cast<float>(PARTS / END))), whole = truncated(part);
    const Floats place = sub(part, whole);
    const Ints which = to_ints(whole);
    Floats sum = looked_up(factors[POINTS - 1], which);
#pragma GCC unroll 4
    for (int i = POINTS - 2; i >= 0; --i) sum = fmadd(sum, place, looked_up(factors[i], which));
    return sum;
  }
};

static const Tails NORMAL_TAILS([](double a) { return std::erfc(a * std::sqrt(0.5)) / 2; });
static const Tails TANH_TAILS([](double a) {  // (1 - tanh(z)) / 2 is the logistic function of -2 z
  return 1 / (1 + std::exp(1.5957691216057308 * (a + 0.044715 * a * a * a)));
});

// x Phi(x) = max(x, 0) - |x| Phi(-|x|)
QOMPOSE_INLINE Floats gelu(const Tails& tails, Floats x) {
  const Floats distance = absolute(x), end = floats(static_cast<float>(Tails::END * (1 - 1e-6)));
  // Behind it no tail is left, so that -inf gives 0.
  const Floats size = where(less(distance, end), distance, floats(0));
  return fnmadd(size, tails(size), max(floats(0), x));
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
      return gelu(NORMAL_TAILS, x);
    case GELU_TANH:
      return gelu(TANH_TAILS, x);
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

// What there is for each channel, of a vector of them.
struct OfChannels {
  Floats scale, bias, per_step;
};
template <Function F>
QOMPOSE_INLINE OfChannels of_channels(const Finish& f, int64_t channel) {
  return {load(f.scale + channel), load(f.bias + channel),
          F == NONE ? floats(1) : load(f.per_step + channel)};
}

template <Function F, bool ADD>
QOMPOSE_INLINE Floats value_of(const Finish& f, Ints sum, const OfChannels& c, First some, int64_t at) {
  Floats value = fmadd(to_floats(sum), c.scale, c.bias);
  if (ADD) value = fmadd(other_values(f, some, at), floats(f.other_scale), value);
  return F == NONE ? value : mul(apply<F>(value, f.slope), c.per_step);
}

// Where one operand is NaN, minimum and maximum give the second, so that a float stays NaN.
QOMPOSE_INLINE Floats bounded(const Finish& f, Floats value) {
  return min(floats(f.high), max(floats(f.low), value));
}

// Of four vectors of values, in the order of packing. What no integer of 32 bits is becomes the lowest of
// them, and so does NaN; hence values are bounded above, and only their integers below.
QOMPOSE_INLINE Ints bytes_of(const Finish& f, const Floats* values) {
  Ints steps[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) steps[v] = to_ints(min(floats(f.high), values[v]));
  const Ints zp = words(f.zp), least = words(f.lowest);
  const Ints low = largest_words(least, added_words(zp, packed_words(steps[0], steps[1]))),
             high = largest_words(least, added_words(zp, packed_words(steps[2], steps[3])));
  return f.kind == UINT8 ? packed_unsigned(low, high) : packed_signed(low, high);
}

// Ask for the lines of memory that a tile's results go to, or that values to add come from. Those of wide
// results lie apart, and processors foresee only what lies together.
template <bool TO_WRITE, int ROWS, int BYTES>
QOMPOSE_INLINE void fetch_tile(const void* first, int64_t line) {
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < BYTES; i += 64)
      __builtin_prefetch(static_cast<const char*>(first) + r * line + i, TO_WRITE);
}

// The same of a tile whose sums are not computed yet.
template <bool ADD, bool INTEGERS, int ROWS, int WIDTH>
QOMPOSE_INLINE void fetch_places(const Finish& f, int64_t row, int64_t channel, void* out) {
  constexpr int BYTES = WIDTH * LANES;
  const int64_t first = row * f.channels + channel;
  if (INTEGERS)
    fetch_tile<true, ROWS, BYTES>(static_cast<char*>(out) + first, f.channels);
  else
    fetch_tile<true, ROWS, 4 * BYTES>(static_cast<float*>(out) + first, 4 * f.channels);
  if (!ADD) return;
  if (f.other_kind == FLOAT32)
    fetch_tile<false, ROWS, 4 * BYTES>(static_cast<const float*>(f.other) + first, 4 * f.channels);
  else
    fetch_tile<false, ROWS, BYTES>(static_cast<const char*>(f.other) + first, f.channels);
}

// Sums of some rows, of four whole vectors of channels, or of two or one that may lack some, while they are
// in registers.
template <Function F, bool ADD, bool INTEGERS, int ROWS, int WIDTH>
QOMPOSE_INLINE void finish_sums(const Finish& f, const Ints (&sums)[ROWS][WIDTH], int64_t row,
                                int64_t channel, void* out) {
  constexpr int TOGETHER = 4 / WIDTH;  // rows that are packed to bytes together
  const int64_t first = row * f.channels + channel, left = f.channels - channel;
  const bool whole = WIDTH == 4 || left >= WIDTH * LANES;
  Floats values[ROWS / TOGETHER][4];
  unrolled<WIDTH>([&](auto j) QOMPOSE_INLINED {
    const First some = first_lanes(WIDTH == 4 ? LANES : std::max<int64_t>(0, left - LANES * j));
    const OfChannels c = of_channels<F>(f, channel + LANES * j);
    unrolled<ROWS>([&](auto r) QOMPOSE_INLINED {
      const int64_t at = first + r * f.channels + LANES * j;
      const Floats value = value_of<F, ADD>(f, sums[r][j], c, some, at);
      if (INTEGERS)
        values[r / TOGETHER][r % TOGETHER * WIDTH + j] = value;
      else if (whole)
        store(static_cast<float*>(out) + at, bounded(f, value));
      else
        store(some, static_cast<float*>(out) + at, bounded(f, value));
    });
  });
  if (!INTEGERS) return;
  uint8_t* to = static_cast<uint8_t*>(out) + first;
  unrolled<ROWS / TOGETHER>([&](auto i) QOMPOSE_INLINED {
    const Ints bytes = in_order(bytes_of(f, values[i]));
    if (WIDTH == 4) return store_ints(to + i * f.channels, bytes);
    unrolled<TOGETHER>([&](auto part) QOMPOSE_INLINED {
      uint8_t* place = to + (TOGETHER * i + part) * f.channels;
      if (WIDTH == 2)
        whole ? store_half(place, bytes, part) : store_half(left, place, bytes, part);
      else
        whole ? store_quarter(place, bytes, part) : store_quarter(first_lanes(left), place, bytes, part);
    });
  });
}

// Sums that become integers: of each vector of channels, four rows at a time.
template <Function F, bool ADD>
void finish_bytes(const Finish& f, const Ints* sums, int rows, int width, int64_t row, int64_t channel,
                  uint8_t* out) {
  for (int j = 0; j < width; ++j, channel += LANES) {
    const int64_t left = f.channels - channel;
    if (left <= 0) return;
    const First some = first_lanes(left);
    const OfChannels c = of_channels<F>(f, channel);
    for (int first = 0; first < rows; first += 4) {
      Floats values[4];
      int64_t at[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int r = std::min(first + i, rows - 1);
        at[i] = (row + r) * f.channels + channel;
        values[i] = value_of<F, ADD>(f, sums[r * width + j], c, some, at[i]);
      }
      const Ints bytes = in_order(bytes_of(f, values));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        if (left >= LANES)
          store_quarter(out + at[i], bytes, i);
        else
          store_quarter(some, out + at[i], bytes, i);
    }
  }
}

// Sums that become floats.
template <Function F, bool ADD>
void finish_floats(const Finish& f, const Ints* sums, int rows, int width, int64_t row, int64_t channel,
                   float* out) {
  for (int j = 0; j < width; ++j, channel += LANES) {
    const int64_t left = f.channels - channel;
    if (left <= 0) return;
    const First some = first_lanes(left);
    const OfChannels c = of_channels<F>(f, channel);
    int64_t at = row * f.channels + channel;
    for (int r = 0; r < rows; ++r, at += f.channels) {
      const Floats value = bounded(f, value_of<F, ADD>(f, sums[r * width + j], c, some, at));
      if (left >= LANES)
        store(out + at, value);
      else
        store(some, out + at, value);
    }
  }
}

// Sums of `rows` rows of `width` vectors, to rows of the result from `row` on, at `channel`.
template <Function F, bool ADD, bool INTEGERS>
void finish_tile(const Finish& shared, const Ints* sums, int rows, int width, int64_t row, int64_t channel,
                 void* out) {
  const Finish f = shared;  // a copy that writing to `out` cannot change, so that it stays in registers
  if (!INTEGERS)
    finish_floats<F, ADD>(f, sums, rows, width, row, channel, static_cast<float*>(out));
  else
    finish_bytes<F, ADD>(f, sums, rows, width, row, channel, static_cast<uint8_t*>(out));
}

}  // namespace qompose_x86
