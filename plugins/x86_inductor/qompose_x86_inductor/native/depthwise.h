// SPDX-License-Identifier: Apache-2.0
// Convolutions of each channel by itself: four rows of a vector of channels in one product.
#pragma once

#include "finish.h"
#include "threads.h"
#include "windows.h"

namespace qompose_x86 {

// A block of channels. Bytes of four rows are interleaved as unpack instructions do it, within 128 bits:
// vector v has in its l-th four lanes the channels 16 l + 4 v .. + 3. Weights, scales and biases are stored
// in that order, and packing the sums to bytes undoes it.
constexpr int CHANNELS = 4 * LANES;
// All of a block; the first channels of it; or the first half or less, of two lines of the result at once, of
// which the second has the other half.
enum class Part { ALL, FIRST, TWICE };
constexpr int SIDE_BY_SIDE = LANES == 16 ? 4 : 2;  // pixels whose sums fit in registers

template <Function F>
QOMPOSE_INLINE Floats real_of(const Finish& f, Ints sum, int64_t channel) {
  return value_of<F, false>(f, sum, of_channels<F>(f, channel), first_lanes(LANES), 0);
}

// Floats go where they belong one by one: who reads them is seldom. `line`: of the result.
template <Function F, Part PART>
void finish_pixel_in_floats(const Finish& f, const Ints* sums, int64_t channel, int64_t line, float* out) {
  constexpr int64_t SIZE = PART == Part::TWICE ? CHANNELS / 2 : CHANNELS;
  for (int v = 0; v < 4; ++v) {
    float values[LANES];
    store(values, bounded(f, real_of<F>(f, sums[v], channel + LANES * v)));
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t place = lane / 4 * 16 + 4 * v + lane % 4;
      if (channel + place % SIZE < f.channels) out[place / SIZE * line + place % SIZE] = values[lane];
    }
  }
}

template <Function F, Part PART>
QOMPOSE_INLINE void finish_pixel(const Finish& f, const Ints* sums, int64_t channel, int64_t at, int64_t line,
                                 FirstBytes some, void* out) {
  if (f.kind == FLOAT32)
    return finish_pixel_in_floats<F, PART>(f, sums, channel, line, static_cast<float*>(out) + at);
  Floats values[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) values[v] = real_of<F>(f, sums[v], channel + LANES * v);
  const Ints bytes = bytes_of(f, values);
  char* const to = static_cast<char*>(out) + at;
  if (PART == Part::ALL)
    store_ints(to, bytes);
  else if (PART == Part::FIRST)
    store_bytes(some, to, bytes);
  else
    for (int half = 0; half < 2; ++half) store_half(f.channels - channel, to + half * line, bytes, half);
}

QOMPOSE_INLINE void load_four(const void* from, Ints* vectors) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) vectors[v] = load_ints(static_cast<const char*>(from) + 4 * LANES * v);
}

// A block of one line of the result.
struct Line {
  const Image& g;
  const int8_t* weights;
  const Finish& f;
  int64_t channel, at;  // `at`: where the first pixel goes
  const Bytes* rows;    // the lines of the image that windows read, or a line of zero points; whole fours.
                        // If TWICE, behind them those of the next line of the result
  Bytes blank;
  uint8_t* columns;  // memory for `Columns`
  void* out;
};

// What windows read of the columns of an image, each once for all windows that it is in: the rows of a column
// in fours, as the products take them. They are kept for few pixels at a time, so that they stay in a cache.
struct Columns {
  static constexpr int64_t PIXELS = 24;

  explicit Columns(const Image& g)
      : fours((g.kh + 3) / 4), count((std::min(PIXELS, g.ow) - 1) * g.sw + (g.kw - 1) * g.dw + 1) {}
  int64_t bytes() const { return count * fours * 4 * CHANNELS; }

  const int64_t fours, count;
};

// Columns from number `from` of the image on, which may lie beside it.
template <Part PART>
QOMPOSE_INLINE void take_columns(const Line& l, int64_t fours, int64_t from, int64_t count, FirstBytes some) {
  const int64_t width = l.g.w, channels = l.g.c, channel = l.channel;
  uint8_t* to = l.columns;
  for (int64_t z = from; z < from + count; ++z) {
    const bool inside = z >= 0 && z < width;
    const int64_t at = inside ? z * channels + channel : 0;
    for (const Bytes* row = l.rows; row < l.rows + 4 * fours; row += 4, to += 4 * CHANNELS) {
      Ints x[4];
#pragma GCC unroll 4
      for (int64_t t = 0; t < 4; ++t) {
        const uint8_t* bytes = (inside ? row[t] : l.blank) + at;
        x[t] = PART == Part::ALL ? load_ints(bytes)
               : PART == Part::FIRST
                   ? load_bytes(some, bytes)
                   : load_halves(channels - channel, bytes, (inside ? row[4 * fours + t] : l.blank) + at);
      }
      const Ints low01 = low_bytes(x[0], x[1]), high01 = high_bytes(x[0], x[1]);
      const Ints low23 = low_bytes(x[2], x[3]), high23 = high_bytes(x[2], x[3]);
      store_ints(to, low_words(low01, low23));
      store_ints(to + CHANNELS, high_words(low01, low23));
      store_ints(to + 2 * CHANNELS, low_words(high01, high23));
      store_ints(to + 3 * CHANNELS, high_words(high01, high23));
    }
  }
}

// PIXELS side by side, the first of which begins at a column that was taken.
template <Function F, Part PART, int PIXELS>
QOMPOSE_INLINE void some_pixels(const Line& l, const Finish& f, int64_t fours, int64_t first, int64_t at,
                                FirstBytes some) {
  const int64_t each = fours * 4 * CHANNELS, step = l.g.sw * each;
  const uint8_t* from = l.columns + first * each;
  const int8_t* weights = l.weights;
  Ints sums[PIXELS][4];
#pragma GCC unroll 4
  for (int p = 0; p < PIXELS; ++p) load_four(f.start + l.channel, sums[p]);
  for (int64_t column = 0; column < l.g.kw; ++column, from += l.g.dw * each)
    for (int64_t at_four = 0; at_four < each; at_four += 4 * CHANNELS, weights += 4 * CHANNELS)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const Ints w = load_ints(weights + CHANNELS * v);
#pragma GCC unroll 4
        for (int p = 0; p < PIXELS; ++p) {
          const Ints x = load_ints(from + p * step + at_four + CHANNELS * v);
          sums[p][v] = dot(sums[p][v], x, w);
        }
      }
#pragma GCC unroll 4
  for (int p = 0; p < PIXELS; ++p)
    finish_pixel<F, PART>(f, sums[p], l.channel, at + p * f.channels, l.g.ow * f.channels, some, l.out);
}

template <Function F, Part PART>
void depthwise_line(const Line& l) {
  const Image& g = l.g;
  const Finish f = l.f;  // a copy that writing to the result cannot change, so that it stays in registers
  const FirstBytes some = first_bytes(f.channels - l.channel);
  const Columns columns(g);
  for (int64_t first = 0; first < g.ow; first += Columns::PIXELS) {
    const int64_t pixels = std::min(Columns::PIXELS, g.ow - first);
    const int64_t count = (pixels - 1) * g.sw + (g.kw - 1) * g.dw + 1;
    take_columns<PART>(l, columns.fours, first * g.sw - g.pw, count, some);
    int64_t at = l.at + first * f.channels, pixel = 0;
    for (; pixel + SIDE_BY_SIDE <= pixels; pixel += SIDE_BY_SIDE, at += SIDE_BY_SIDE * f.channels)
      some_pixels<F, PART, SIDE_BY_SIDE>(l, f, columns.fours, pixel * g.sw, at, some);
    for (; pixel < pixels; ++pixel, at += f.channels)
      some_pixels<F, PART, 1>(l, f, columns.fours, pixel * g.sw, at, some);
  }
}

using DepthwiseLine = void (*)(const Line&);

inline DepthwiseLine depthwise_of(Function function, Part part) {
  return with_function<DepthwiseLine>(function, [=](auto constant) {
    constexpr Function F = constant;
    return part == Part::ALL     ? depthwise_line<F, Part::ALL>
           : part == Part::FIRST ? depthwise_line<F, Part::FIRST>
                                 : depthwise_line<F, Part::TWICE>;
  });
}

// Lines of a result, with memory for each thread. Weights: [block of channels][column][four rows][vector]
// [channel][row]; those of a last block of half the channels or less are there twice.
class DepthwiseLines {
 public:
  DepthwiseLines(const Image& image, const int8_t* weights, const Finish& f, void* out, int threads)
      : g(image),
        weights(weights),
        f(f),
        out(out),
        columns(g),
        whole_blocks(f.channels / CHANNELS),
        left(f.channels - whole_blocks * CHANNELS),
        all(depthwise_of(f.function, Part::ALL)),
        first(depthwise_of(f.function, Part::FIRST)),
        twice(depthwise_of(f.function, Part::TWICE)),
        blank(std::max<int64_t>(1, g.w) * g.c, g.x_zp),
        rows(2 * threads * rows_each(), blank.data()),  // weights of rows below kh are 0
        taken(threads * columns.bytes() + 64) {}

  // Lines that are computed together.
  int64_t at_once() const { return left > 0 && left <= CHANNELS / 2 ? 2 : 1; }

  void work(int thread, int64_t from, int64_t to) {
    Bytes* here = &rows[2 * thread * rows_each()];
    for (int64_t line = from; line < to; line += at_once()) {
      const bool two = at_once() == 2 && line + 1 < to;
      find(line, here);
      if (two) find(line + 1, here + rows_each());
      for (int64_t block = 0; block < whole_blocks; ++block) {
        all(line_of(thread, line, block, here));
        if (two) all(line_of(thread, line + 1, block, here + rows_each()));
      }
      if (left > 0) (two ? twice : first)(line_of(thread, line, whole_blocks, here));
    }
  }

 private:
  int64_t rows_each() const { return 4 * columns.fours; }

  void find(int64_t line, Bytes* to) const {
    const int64_t top = line % g.oh * g.sh - g.ph;
    for (int64_t i = 0; i < g.kh; ++i) {
      const int64_t y = top + i * g.dh;
      to[i] = y >= 0 && y < g.h ? g.x + (line / g.oh * g.h + y) * g.w * g.c : blank.data();
    }
  }

  Line line_of(int thread, int64_t line, int64_t block, const Bytes* its_rows) {
    const int64_t channel = block * CHANNELS, block_bytes = g.kw * columns.fours * 4 * CHANNELS;
    uint8_t* const aligned = &taken[63 - (reinterpret_cast<uintptr_t>(taken.data()) + 63) % 64];
    return {g,
            weights + block * block_bytes,
            f,
            channel,
            line * g.ow * f.channels + channel,
            its_rows,
            blank.data(),
            aligned + thread * columns.bytes(),
            out};
  }

  const Image& g;
  const int8_t* weights;
  const Finish& f;
  void* out;
  const Columns columns;
  const int64_t whole_blocks, left;  // `left`: channels of the last block, if it is not whole
  const DepthwiseLine all, first, twice;
  const std::vector<uint8_t> blank;
  std::vector<Bytes> rows;
  std::vector<uint8_t> taken;
};

inline void depthwise(const Image& g, const int8_t* weights, const Finish& f, void* out, int available) {
  const int64_t lines = g.n * g.oh;
  const int threads = threads_for(g.pixels() * f.channels * g.kh * g.kw, lines, available);
  DepthwiseLines all(g, weights, f, out, threads);
  const int64_t at_once = all.at_once(), parts = (lines + at_once - 1) / at_once;
  in_parallel(threads, parts, [&](int thread, int64_t from, int64_t to) {
    all.work(thread, from * at_once, std::min(lines, to * at_once));
  });
}

}  // namespace qompose_x86
