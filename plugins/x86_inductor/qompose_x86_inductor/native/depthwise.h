// SPDX-License-Identifier: Apache-2.0
// Convolutions of each channel by itself, on AVX-512 VNNI: four rows of 16 channels in one instruction.
#pragma once

#include "finish.h"
#include "threads.h"
#include "windows.h"

namespace qompose_x86 {

// 64 channels. Bytes of four rows are interleaved as unpack instructions do it, within 128 bits: vector v has
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
  uint8_t* columns;  // memory for `Columns`
  void* out;
};

// What windows read of the columns of an image, each once for all windows that it is in: the rows of a column
// in fours, as the products take them. They are kept for few pixels at a time, so that they stay in a cache.
struct Columns {
  static constexpr int64_t PIXELS = 24;

  explicit Columns(const Image& g)
      : fours((g.kh + 3) / 4), count((PIXELS - 1) * g.sw + (g.kw - 1) * g.dw + 1) {}
  int64_t bytes() const { return count * fours * 256; }

  const int64_t fours, count;
};

// Columns from number `from` of the image on, which may lie beside it.
inline void take_columns(const Line& l, const Columns& columns, int64_t from, int64_t count, __mmask64 mask) {
  const Image& g = l.g;
  uint8_t* to = l.columns;
  for (int64_t z = from; z < from + count; ++z) {
    const bool inside = z >= 0 && z < g.w;
    const int64_t at = z * g.c + l.channel;
    for (int64_t first = 0; first < 4 * columns.fours; first += 4, to += 256) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int64_t t = 0; t < 4; ++t)
        x[t] = first + t < g.kh ? _mm512_maskz_loadu_epi8(mask, inside ? l.rows[first + t] + at : l.blank)
                                : _mm512_setzero_si512();
      const __m512i low01 = _mm512_unpacklo_epi8(x[0], x[1]), high01 = _mm512_unpackhi_epi8(x[0], x[1]);
      const __m512i low23 = _mm512_unpacklo_epi8(x[2], x[3]), high23 = _mm512_unpackhi_epi8(x[2], x[3]);
      _mm512_store_si512(to, _mm512_unpacklo_epi16(low01, low23));
      _mm512_store_si512(to + 64, _mm512_unpackhi_epi16(low01, low23));
      _mm512_store_si512(to + 128, _mm512_unpacklo_epi16(high01, high23));
      _mm512_store_si512(to + 192, _mm512_unpackhi_epi16(high01, high23));
    }
  }
}

// PIXELS side by side, the first of which begins at a column that was taken.
template <Function F, int PIXELS>
QOMPOSE_INLINE void some_pixels(const Line& l, const Finish& f, int64_t fours, int64_t first, int64_t at,
                                __mmask64 mask) {
  const int64_t each = fours * 256, step = l.g.sw * each;
  const uint8_t* from = l.columns + first * each;
  const int8_t* weights = l.weights;
  __m512i sums[PIXELS][4];
#pragma GCC unroll 4
  for (int p = 0; p < PIXELS; ++p) load_four(f.start + l.channel, sums[p]);
  for (int64_t column = 0; column < l.g.kw; ++column, from += l.g.dw * each)
    for (int64_t at_four = 0; at_four < each; at_four += 256, weights += 256)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m512i w = _mm512_loadu_si512(weights + 64 * v);
#pragma GCC unroll 4
        for (int p = 0; p < PIXELS; ++p) {
          const __m512i x = _mm512_load_si512(from + p * step + at_four + 64 * v);
          sums[p][v] = _mm512_dpbusd_epi32(sums[p][v], x, w);
        }
      }
#pragma GCC unroll 4
  for (int p = 0; p < PIXELS; ++p) finish_pixel<F>(f, sums[p], l.channel, at + p * f.channels, mask, l.out);
}

template <Function F>
void depthwise_line(const Line& l) {
  const Image& g = l.g;
  const Finish f = l.f;  // a copy that writing to the result cannot change, so that it stays in registers
  const int64_t left = f.channels - l.channel;
  const __mmask64 mask = left >= CHANNELS ? ~0ull : (1ull << left) - 1;
  const Columns columns(g);
  for (int64_t first = 0; first < g.ow; first += Columns::PIXELS) {
    const int64_t pixels = std::min(Columns::PIXELS, g.ow - first);
    const int64_t count = (pixels - 1) * g.sw + (g.kw - 1) * g.dw + 1;
    take_columns(l, columns, first * g.sw - g.pw, count, mask);
    int64_t at = l.at + first * f.channels, pixel = 0;
    for (; pixel + 4 <= pixels; pixel += 4, at += 4 * f.channels)
      some_pixels<F, 4>(l, f, columns.fours, pixel * g.sw, at, mask);
    for (; pixel < pixels; ++pixel, at += f.channels)
      some_pixels<F, 1>(l, f, columns.fours, pixel * g.sw, at, mask);
  }
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

// Weights: [64 channels][column][four rows][vector][channel][row].
inline void depthwise(const Image& g, const int8_t* weights, const Finish& f, void* out, int available) {
  const int64_t lines = g.n * g.oh, blocks = (f.channels + CHANNELS - 1) / CHANNELS;
  const Columns columns(g);
  const int64_t block_bytes = g.kw * columns.fours * 4 * CHANNELS;
  const DepthwiseLine one = depthwise_of(f.function);
  const int threads = threads_for(g.pixels() * f.channels * g.kh * g.kw, lines, available);
  const std::vector<uint8_t> blank(std::max<int64_t>(1, g.w) * g.c, g.x_zp);
  std::vector<Bytes> rows_of_all(threads * g.kh);
  std::vector<uint8_t> columns_of_all(threads * columns.bytes() + 64);
  uint8_t* const aligned =
      &columns_of_all[63 - (reinterpret_cast<uintptr_t>(columns_of_all.data()) + 63) % 64];
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
             line * g.ow * f.channels + block * CHANNELS, rows, blank.data(),
             aligned + thread * columns.bytes(), out});
    }
  });
}

}  // namespace qompose_x86
