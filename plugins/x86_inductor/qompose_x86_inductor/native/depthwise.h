// SPDX-License-Identifier: Apache-2.0
// Convolutions of each channel by itself, on AVX-512 VNNI: four taps of 16 channels in one instruction.
#pragma once

#include "finish.h"
#include "threads.h"
#include "windows.h"

namespace qompose_x86 {

// 64 channels. Bytes of four taps are interleaved as unpack instructions do it, within 128 bits: vector v has
// in lane l the channels 16 l + 4 v .. + 3. Weights, scales and biases are stored in that order, and packing
// the sums to bytes undoes it.
constexpr int CHANNELS = 64;

template <Function F>
QOMPOSE_INLINE void finish_pixel(const Finish& f, const __m512i* sums, int64_t channel, int64_t at,
                                 __mmask64 mask, void* out) {
  __m512i steps[4];
  for (int v = 0; v < 4; ++v) {
    const __m512 scale = _mm512_loadu_ps(f.scale + channel + 16 * v),
                 bias = _mm512_loadu_ps(f.bias + channel + 16 * v);
    const __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[v]), scale, bias);
    if (f.kind == FLOAT32) {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35, 48, 49, 50, 51);
      const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(4 * v));
      const int left = static_cast<int>(std::min<int64_t>(f.channels - channel, CHANNELS));
      const __mmask16 kept = _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(left));
      const __m512 given = bounded<F, false>(f, value);
      _mm512_mask_i32scatter_ps(static_cast<float*>(out) + at, kept, index, given, 4);
    } else {
      steps[v] = steps_of(f, bounded<F, true>(f, value));
    }
  }
  if (f.kind == FLOAT32) return;
  const __m512i low = _mm512_packs_epi32(steps[0], steps[1]), high = _mm512_packs_epi32(steps[2], steps[3]);
  const __m512i bytes = f.kind == UINT8 ? _mm512_packus_epi16(low, high) : _mm512_packs_epi16(low, high);
  if (mask == ~0ull)
    _mm512_storeu_si512(static_cast<char*>(out) + at, bytes);
  else
    _mm512_mask_storeu_epi8(static_cast<char*>(out) + at, mask, bytes);
}

QOMPOSE_INLINE void add_four(const __m512i* x, const __m512i* weights, __m512i* sums) {
  const __m512i low01 = _mm512_unpacklo_epi8(x[0], x[1]), high01 = _mm512_unpackhi_epi8(x[0], x[1]);
  const __m512i low23 = _mm512_unpacklo_epi8(x[2], x[3]), high23 = _mm512_unpackhi_epi8(x[2], x[3]);
  sums[0] = _mm512_dpbusd_epi32(sums[0], _mm512_unpacklo_epi16(low01, low23), weights[0]);
  sums[1] = _mm512_dpbusd_epi32(sums[1], _mm512_unpackhi_epi16(low01, low23), weights[1]);
  sums[2] = _mm512_dpbusd_epi32(sums[2], _mm512_unpacklo_epi16(high01, high23), weights[2]);
  sums[3] = _mm512_dpbusd_epi32(sums[3], _mm512_unpackhi_epi16(high01, high23), weights[3]);
}

QOMPOSE_INLINE void load_four(const void* from, __m512i* vectors) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) vectors[v] = _mm512_loadu_si512(static_cast<const char*>(from) + 64 * v);
}

// 64 channels of one line of the result.
struct Line {
  const Image& g;
  const int8_t* weights;
  const Finish& f;
  int64_t channel, at;  // `at`: where the first pixel goes
  const Bytes* rows;    // the lines of the image that windows read, or a line of zero points
  Bytes blank;
  void* out;
};

// Pixels whose windows are in the image, SIDE x SIDE taps, all unrolled. Few weights stay in registers.
template <Function F, int SIDE>
void inner_pixels(const Line& l, const Finish& f, int64_t column, int64_t stop, __mmask64 mask) {
  constexpr int TAPS = SIDE * SIDE, FOURS = (TAPS + 3) / 4, KEPT = FOURS <= 3 ? FOURS : 1;
  const int64_t gap = l.g.dw * l.g.c, step = l.g.sw * l.g.c;
  int64_t from = column * step - l.g.pw * l.g.c + l.channel, at = l.at + column * f.channels;
  Bytes rows[SIDE];
  for (int i = 0; i < SIDE; ++i) rows[i] = l.rows[i];
  __m512i kept[4 * KEPT];
  for (int four = 0; four < KEPT; ++four) load_four(l.weights + 256 * four, kept + 4 * four);
  for (; column < stop; ++column, from += step, at += f.channels) {
    __m512i sums[4];
    load_four(f.start + l.channel, sums);
#pragma GCC unroll 8
    for (int four = 0; four < FOURS; ++four) {
      __m512i x[4], weights[4];
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const int tap = 4 * four + t;
        x[t] = tap < TAPS ? _mm512_maskz_loadu_epi8(mask, rows[tap / SIDE] + from + tap % SIDE * gap)
                          : _mm512_setzero_si512();
      }
      if (FOURS > KEPT) load_four(l.weights + 256 * four, weights);
      add_four(x, FOURS > KEPT ? weights : kept + 4 * four, sums);
    }
    finish_pixel<F>(f, sums, l.channel, at, mask, l.out);
  }
}

template <Function F>
void any_pixels(const Line& l, const Finish& f, int64_t column, int64_t stop, __mmask64 mask) {
  const Image& g = l.g;
  for (; column < stop; ++column) {
    const int64_t from = column * g.sw - g.pw, taps = g.kh * g.kw;
    __m512i sums[4], weights[4];
    load_four(f.start + l.channel, sums);
    for (int64_t first = 0; first < taps; first += 4) {
      __m512i x[4];
      for (int64_t t = 0; t < 4; ++t) {
        const int64_t tap = first + t, z = from + tap % g.kw * g.dw;
        const bool inside = tap < taps && z >= 0 && z < g.w;
        x[t] = _mm512_maskz_loadu_epi8(mask, inside ? l.rows[tap / g.kw] + z * g.c + l.channel : l.blank);
      }
      load_four(l.weights + 64 * first, weights);
      add_four(x, weights, sums);
    }
    finish_pixel<F>(f, sums, l.channel, l.at + column * f.channels, mask, l.out);
  }
}

template <Function F>
void depthwise_line(const Line& l) {
  const Image& g = l.g;
  const Finish f = l.f;  // a copy that writing to the result cannot change, so that it stays in registers
  const int64_t left = f.channels - l.channel;
  const __mmask64 mask = left >= CHANNELS ? ~0ull : (1ull << left) - 1;
  // Columns of the result, from the first one whose window begins in the image to the last one that ends in
  // it.
  const int64_t room = g.w - 1 - (g.kw - 1) * g.dw + g.pw;
  const int64_t first = std::min((g.pw + g.sw - 1) / g.sw, g.ow);
  const int64_t last = std::max(first, room < 0 ? 0 : std::min(room / g.sw + 1, g.ow));
  any_pixels<F>(l, f, 0, first, mask);
  if (g.kh == 3 && g.kw == 3)
    inner_pixels<F, 3>(l, f, first, last, mask);
  else if (g.kh == 5 && g.kw == 5)
    inner_pixels<F, 5>(l, f, first, last, mask);
  else
    any_pixels<F>(l, f, first, last, mask);
  any_pixels<F>(l, f, last, g.ow, mask);
}

using DepthwiseLine = void (*)(const Line&);

inline DepthwiseLine depthwise_of(Function function) {
  switch (function) {
    case HARDSWISH:
      return depthwise_line<HARDSWISH>;
    case SWISH:
      return depthwise_line<SWISH>;
    case GELU_ERF:
      return depthwise_line<GELU_ERF>;
    case GELU_TANH:
      return depthwise_line<GELU_TANH>;
    case TANH:
      return depthwise_line<TANH>;
    case LEAKY_RELU:
      return depthwise_line<LEAKY_RELU>;
    default:
      return depthwise_line<NONE>;
  }
}

// Weights: [64 channels][four taps][vector][channel][tap].
inline void depthwise(const Image& g, const int8_t* weights, const Finish& f, void* out, int available) {
  const int64_t lines = g.n * g.oh, blocks = (f.channels + CHANNELS - 1) / CHANNELS;
  const int64_t block_bytes = (g.kh * g.kw + 3) / 4 * 4 * CHANNELS;
  const DepthwiseLine one = depthwise_of(f.function);
  const int threads = threads_for(g.pixels() * f.channels * g.kh * g.kw, lines, available);
  const std::vector<uint8_t> blank(std::max<int64_t>(1, g.w) * g.c, g.x_zp);
  std::vector<Bytes> rows_of_all(threads * g.kh);
  in_parallel(threads, lines, [&](int thread, int64_t from, int64_t to) {
    Bytes* rows = &rows_of_all[thread * g.kh];
    for (int64_t line = from; line < to; ++line) {
      const int64_t top = line % g.oh * g.sh - g.ph;
      for (int64_t i = 0; i < g.kh; ++i) {
        const int64_t y = top + i * g.dh;
        rows[i] = y >= 0 && y < g.h ? g.x + (line / g.oh * g.h + y) * g.w * g.c : blank.data();
      }
      for (int64_t block = 0; block < blocks; ++block)
        one({g, weights + block * block_bytes, f, block * CHANNELS,
             line * g.ow * f.channels + block * CHANNELS, rows, blank.data(), out});
    }
  });
}

}  // namespace qompose_x86
