// SPDX-License-Identifier: Apache-2.0
// Attention of floats: rows of scores are computed, made probabilities and multiplied by the values while
// they are in a core's cache.
#pragma once

#include "heads.h"
#include "products.h"

namespace qompose_x86 {

struct FloatAttention : Heads {
  Strided<float> q, k, v;
  float scale;

  // All rows of a tile up to 87,000 keys: with fewer, keys and values come from memory again and again.
  int64_t rows_at_once() const { return rows_within(1 << 20); }
};

// Where products go, times `factor`, and added to what is there if `added`.
struct Products {
  float* out;
  int64_t line;
  float factor;
  bool added;
};

// Products of ROWS rows, as long as `depth`, and a panel, of each of whose lines there are WIDTH vectors.
template <int WIDTH, int ROWS>
struct MultiplyTile {
  static void run(const float* const* rows, int64_t depth, const float* panel, int64_t line,
                  const Products& to) {
    Floats sums[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < WIDTH; ++j) sums[r][j] = floats(0);
    for (int64_t d = 0; d < depth; ++d, panel += line) {
      Floats columns[WIDTH];
#pragma GCC unroll 16
      for (int j = 0; j < WIDTH; ++j) columns[j] = load(panel + j * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const Floats value = floats(rows[r][d]);
#pragma GCC unroll 16
        for (int j = 0; j < WIDTH; ++j) sums[r][j] = fmadd(value, columns[j], sums[r][j]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < WIDTH; ++j) {
        float* out = to.out + r * to.line + j * LANES;
        const Floats value = mul(sums[r][j], floats(to.factor));
        store(out, to.added ? add(load(out), value) : value);
      }
  }
};

// The same of any number of rows.
inline void multiply(int width, int rows, const float* const* from, int64_t depth, const float* panel,
                     int64_t line, Products to) {
  for (int r = 0; r < rows; r += MOST_ROWS[width], to.out += MOST_ROWS[width] * to.line)
    tile_of<MultiplyTile>(width, std::min(MOST_ROWS[width], rows - r))(from + r, depth, panel, line, to);
}

// Rows of scores that become probabilities, and the sums of values that they weigh.
class RowsOfFloats {
 public:
  RowsOfFloats(const Heads& heads, float* scores, float* sums, void* out)
      : heads(heads),
        scores(scores),
        sums(sums),
        out(static_cast<float*>(out)),
        row_keys(heads.row_keys()),
        columns(rounded_up(heads.value_width, LANES)) {}

  // Make probabilities of a row of scores, and return what divides its result; 0: it has none.
  float weigh(int64_t batch, int64_t head, int64_t row, int r, int64_t used) {
    float* row_scores = scores + r * row_keys;
    const float most = heads.mask_row(row_scores, batch, head, row, used);
    if (most == -INFINITE && (heads.safe_softmax || heads.keys == 0)) return 0;
    if (!(most > -INFINITE)) return std::numeric_limits<float>::quiet_NaN();
    Floats sum = floats(0), some = sum;
    for (int64_t i = 0; i < used; i += LANES) {
      if (i % KEYS_AT_ONCE == 0) sum = add(sum, some), some = floats(0);
      const Floats below = sub(load(row_scores + i), floats(most)), e = exponential(below);
      // `exponential` is never 0, and what a mask hides may be huge. NaN stays.
      const Floats probability = where(less(below, floats(-87)), floats(0), e);
      store(row_scores + i, probability);
      some = add(some, probability);
    }
    return sum_of_lanes(add(sum, some));
  }

  void finish(int64_t batch, int64_t head, int64_t row, int r, float total) {
    float* to = out + ((batch * heads.queries + row) * heads.heads + head) * heads.value_width;
    // Sums of a row without probabilities are of scores: they may be NaN.
    const bool blank = total == 0;
    const Floats factor = floats(blank ? 0 : 1 / total);
    for (int64_t column = 0; column < heads.value_width; column += LANES) {
      const Floats sum = blank ? floats(0) : load(sums + r * columns + column);
      store(first_lanes(heads.value_width - column), to + column, mul(sum, factor));
    }
  }

 protected:
  // Sums of more keys, one after another in float32, are added up in turn: they would lose digits.
  static constexpr int64_t KEYS_AT_ONCE = 256;
  const Heads& heads;
  float *scores, *sums, *out;
  const int64_t row_keys, columns;
};

class AttendingFloats : public RowsOfFloats {
 public:
  struct Scratch {
    // Keys [panel][column][key], values [panel][key][column]; rows of queries that do not lie together.
    float *keys, *values, *rows, *scores, *sums;
    Scratch(const FloatAttention& a, Parts& parts)
        : keys(parts.next<float>(rounded_up(a.keys, PANEL) * a.width)),
          values(parts.next<float>(a.keys * rounded_up(a.value_width, LANES))),
          rows(parts.next<float>(a.rows_at_once() * a.width)),
          scores(parts.next<float>(a.rows_at_once() * a.row_keys())),
          sums(parts.next<float>(a.rows_at_once() * rounded_up(a.value_width, LANES))) {}
  };

  AttendingFloats(const FloatAttention& a, const Scratch& s, void* out)
      : RowsOfFloats(a, s.scores, s.sums, out), a(a), s(s) {}

  void pack(int64_t batch, int64_t head) {
    pack_keys(batch, head);
    pack_values(batch, head);
  }

  void score(int64_t batch, int64_t head, int64_t row, int rows, int64_t used) {
    fetch_next_head(batch, head, row, row + rows);
    const float* starts[TALLEST];
    for (int r = 0; r < rows; ++r) {
      starts[r] = a.q.at(batch, head, row + r);
      if (a.q.strides[3] == 1) continue;
      copy(starts[r], a.q.strides[3], a.width, s.rows + r * a.width, a.width);
      starts[r] = s.rows + r * a.width;
    }
    for (int64_t first = 0; first < used; first += PANEL)
      multiply(vectors_at(first, used), rows, starts, a.width, s.keys + first * a.width, PANEL,
               {s.scores + first, row_keys, a.scale, false});
  }

  // Sums of probabilities and values.
  void gather(int rows, int64_t used) {
    for (int64_t first = 0; first < columns; first += PANEL) {
      const int vectors = vectors_at(first, columns);
      for (int64_t key = 0; key < used; key += KEYS_AT_ONCE) {
        const float* starts[TALLEST];
        for (int r = 0; r < rows; ++r) starts[r] = s.scores + r * row_keys + key;
        multiply(vectors, rows, starts, std::min(KEYS_AT_ONCE, used - key),
                 s.values + first * a.keys + key * vectors * LANES, vectors * LANES,
                 {s.sums + first, columns, 1, key > 0});
      }
    }
  }

 private:
  static constexpr int64_t AHEAD = 16;               // keys
  static constexpr int64_t MOST_FETCHED = 64 << 10;  // values of a head, which a second cache holds

  static int vectors_at(int64_t first, int64_t size) {
    return static_cast<int>((std::min(PANEL, size - first) + LANES - 1) / LANES);
  }

  void pack_keys(int64_t batch, int64_t head) {
    for (int64_t key = 0; key < a.keys; key += 4) {
      for (int64_t i = key; i < std::min(key + 4, a.keys); ++i) {
        fetch(a.v.at(batch, head, i), a.value_width);
        if (i + AHEAD < a.keys) fetch(a.k.at(batch, head, i + AHEAD), a.width);
      }
      const int count = static_cast<int>(std::min<int64_t>(4, a.keys - key));
      float* to = s.keys + key / PANEL * PANEL * a.width + key % PANEL;
      int64_t column = 0;
      if (count == 4 && a.k.strides[3] == 1)
        for (; column + 4 <= a.width; column += 4)
          transpose(a.k.at(batch, head, key, column), a.k.strides[2], to + column * PANEL);
      for (; column < a.width; ++column)
        for (int i = 0; i < count; ++i) to[column * PANEL + i] = *a.k.at(batch, head, key + i, column);
    }
    // What is behind the last key is multiplied, and not used.
    const int64_t rest = a.keys / PANEL * PANEL;
    for (int64_t key = a.keys; key < rounded_up(a.keys, PANEL); ++key)
      for (int64_t column = 0; column < a.width; ++column)
        s.keys[rest * a.width + column * PANEL + key - rest] = 0;
  }

  // Rows of a head often lie apart, and processors foresee only what lies together. `LEVEL`: of the cache.
  template <int LEVEL = 1>
  static void fetch(const float* row, int64_t width) {
    for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(row + i, 0, 4 - LEVEL);
  }

  // Ask for the share of the next head that rows `from` to `to` are of this one, while these are computed.
  void fetch_next_head(int64_t batch, int64_t head, int64_t from, int64_t to) const {
    if (++head == a.heads) ++batch, head = 0;
    if (batch == a.batches || a.keys * (a.width + a.value_width) > MOST_FETCHED) return;
    for (int64_t row = from; row < to; ++row) fetch<2>(a.q.at(batch, head, row), a.width);
    const int64_t group = a.heads / a.shared_heads;
    if (head % group != 0) return;
    for (int64_t key = a.keys * from / a.queries; key < a.keys * to / a.queries; ++key) {
      fetch<2>(a.k.at(batch, head / group, key), a.width);
      fetch<2>(a.v.at(batch, head / group, key), a.value_width);
    }
  }

  // Four columns of four keys, to the same lines of a panel.
  static void transpose(const float* from, int64_t line, float* to) {
    __m128 x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_ps(from + i * line);
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + i * PANEL, x[i]);
  }

  void pack_values(int64_t batch, int64_t head) {
    for (int64_t first = 0; first < columns; first += PANEL) {
      const int64_t line = vectors_at(first, columns) * LANES;
      float* to = s.values + first * a.keys;
      for (int64_t key = 0; key < a.keys; ++key, to += line)
        copy(a.v.at(batch, head, key, first), a.v.strides[3], std::min(line, a.value_width - first), to,
             line);
    }
  }

  // Some values, and zeros up to a length, which is of whole vectors.
  static void copy(const float* from, int64_t step, int64_t count, float* to, int64_t length) {
    if (step == 1) {
      for (int64_t i = 0; i < length; i += LANES) store(to + i, load(first_lanes(count - i), from + i));
      return;
    }
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * step];
    for (int64_t i = count; i < length; ++i) to[i] = 0;
  }

  const FloatAttention& a;
  const Scratch s;
};

// Products of bytes that take as long as a query and a key: one of floats takes as long as four of them, and
// an exponential as long as some.
inline int64_t products_each(const Heads& a) { return 4 * (a.width + a.value_width + 24); }

}  // namespace qompose_x86
