// SPDX-License-Identifier: Apache-2.0
// Layers of LSTM and GRU on AVX-512 VNNI: int8 weights, and inputs and states that are quantized row by row
// when they are read. A row becomes two digits of eight bits for each value, 256 * high + low, so that a
// product reads the weights once and loses no more than a float of 16 bits would.
#pragma once

#include <cmath>

#include "finish.h"
#include "products.h"
#include "threads.h"

namespace qompose_x86 {

enum RecurrentSize : int {
  GATES,
  INPUT_WIDTH,
  HIDDEN,
  PROJECTED,
  LAYERS,
  DIRECTIONS,
  BATCH_FIRST,
  RECURRENT_SIZES
};

constexpr int LSTM_GATES = 4, GRU_GATES = 3;
constexpr int64_t ROWS_EACH = 24;            // of a task: whole tiles of two digits by any number of gates
constexpr int64_t GATE_BYTES = 4 << 20;      // of products of inputs that are kept for the steps to come
constexpr float LARGEST_DIGITS = 127 * 256;  // whose digits are in -127..127 and -128..127
constexpr float LEAST_RANGE = 1e-30f;

inline int64_t whole_vectors(int64_t count) { return (count + 15) / 16 * 16; }

// A weight of as many rows as `start` and `scale` have values, a multiple of 16, packed in panels of `width`
// vectors.
struct Matrix {
  const int8_t* weights;
  const int32_t* start;  // what sums begin with, as digits are stored 128 higher
  const float* scale;
  const float* bias;
  int64_t depth;

  int64_t quads() const { return (depth + 3) / 4; }
};

struct Cell {
  Matrix input, hidden, projection;
};

struct Recurrent {
  int gates;
  int64_t input_width, hidden, projected, layers, directions;  // projected: 0 without a projection
  bool batch_first;
  int64_t steps, batch;
  const float *x, *first_hidden, *first_cell;
  const int8_t* weights;
  const int32_t* starts;
  const float* values;
  float *out, *last_hidden, *last_cell;

  int64_t width() const { return projected ? projected : hidden; }  // of a hidden state
  int64_t blocks() const { return (hidden + 15) / 16; }
  int64_t channels() const { return blocks() * 16 * gates; }
  int64_t depth_of(int64_t layer) const { return layer == 0 ? input_width : width() * directions; }
  int rows_of_tile() const { return MOST_ROWS[gates] / 2; }
};

// Bytes, sums and values of what `vnni_recurrent.pack` makes.
struct Totals {
  int64_t weights = 0, starts = 0, values = 0;
};

// Of the list of numbers, in the order of `RecurrentSize`.
inline Recurrent recurrent_of(const int64_t* s, int64_t steps, int64_t batch) {
  Recurrent r = {};
  r.gates = static_cast<int>(s[GATES]);
  r.input_width = s[INPUT_WIDTH];
  r.hidden = s[HIDDEN];
  r.projected = s[PROJECTED];
  r.layers = s[LAYERS];
  r.directions = s[DIRECTIONS];
  r.batch_first = s[BATCH_FIRST] != 0;
  r.steps = steps;
  r.batch = batch;
  return r;
}

inline Matrix next_matrix(const Recurrent& r, int64_t rows, int64_t depth, bool has_bias, Totals& at) {
  const Matrix found = {r.weights + at.weights, r.starts + at.starts, r.values + at.values,
                        has_bias ? r.values + at.values + rows : nullptr, depth};
  at.weights += rows * found.quads() * 4;
  at.starts += rows;
  at.values += has_bias ? 2 * rows : rows;
  return found;
}

inline Cell next_cell(const Recurrent& r, int64_t layer, Totals& at) {
  Cell cell = {};
  cell.input = next_matrix(r, r.channels(), r.depth_of(layer), true, at);
  cell.hidden = next_matrix(r, r.channels(), r.width(), true, at);
  if (r.projected) cell.projection = next_matrix(r, whole_vectors(r.projected), r.hidden, false, at);
  return cell;
}

inline Totals totals_of(const Recurrent& r) {
  Totals at;
  for (int64_t layer = 0; layer < r.layers; ++layer)
    for (int64_t direction = 0; direction < r.directions; ++direction) next_cell(r, layer, at);
  return at;
}

// Rows of digits: a line of high ones, then a line of low ones, in steps of `scale`. That of a row with a
// value that is not finite is NaN.
struct Digits {
  uint8_t* bytes;
  float* scale;
  int64_t line;

  void set(int64_t row, const float* from, int64_t count) const {
    uint8_t *high = bytes + 2 * row * line, *low = high + line;
    __m512i most = _mm512_setzero_si512();  // as integers: NaN counts as more than any number
    for (int64_t i = 0; i < count; i += 16) {
      const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask_of(count - i), from + i));
      most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float range;
    std::memcpy(&range, &bits, 4);
    const bool finite = range <= std::numeric_limits<float>::max();
    range = finite ? std::max(range, LEAST_RANGE) : 1;
    scale[row] = finite ? range / LARGEST_DIGITS : std::numeric_limits<float>::quiet_NaN();
    const __m512 inverse = _mm512_set1_ps(LARGEST_DIGITS / range), bound = _mm512_set1_ps(LARGEST_DIGITS);
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 mask = mask_of(count - i);
      __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, from + i), inverse);
      value = _mm512_min_ps(bound, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), bound), value));
      const __m512i whole = _mm512_cvtps_epi32(value), middle = _mm512_set1_epi32(128);
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, middle), 8);
      const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i),
                       _mm512_cvtepi32_epi8(_mm512_add_epi32(upper, middle)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i),
                       _mm512_cvtepi32_epi8(_mm512_add_epi32(lower, middle)));
    }
  }
  static __mmask16 mask_of(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }
};

// Sums of a tile: two rows of digits for each row of floats.
QOMPOSE_INLINE void sum_digits(const Digits& digits, int64_t row, int rows, const Matrix& matrix,
                               int64_t channel, int width, __m512i* sums) {
  Bytes where[2 * 6];
  for (int each = 0; each < 2 * rows; ++each) where[each] = digits.bytes + (2 * row + each) * digits.line;
  const int64_t quads = matrix.quads();
  sum_of(width, 2 * rows)(where, 1, quads, matrix.weights + channel * quads * 4, matrix.start + channel,
                          sums);
}

// A vector of a tile in units.
QOMPOSE_INLINE __m512 real_of(const __m512i* sums, int width, int row, int vector, float step,
                              const float* scale) {
  const __m512 high = _mm512_cvtepi32_ps(sums[2 * row * width + vector]);
  const __m512 low = _mm512_cvtepi32_ps(sums[(2 * row + 1) * width + vector]);
  const __m512 sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256), low);
  return _mm512_mul_ps(sum, _mm512_mul_ps(_mm512_set1_ps(step), _mm512_loadu_ps(scale)));
}

QOMPOSE_INLINE __m512 hyperbolic_tangent(__m512 x) { return apply<TANH>(x, 0); }

// One layer: where it reads and writes, and memory for all that it keeps.
class Layer {
 public:
  Layer(const Recurrent& recurrent, int64_t layer, const Cell* cells, const float* from, float* to,
        int threads)
      : r(recurrent),
        layer(layer),
        cells(cells),
        depth(r.depth_of(layer)),
        is_first(layer == 0),
        is_last(layer + 1 == r.layers),
        from(from),
        to(to),
        chunk(std::max<int64_t>(1,
                                std::min(r.steps, GATE_BYTES / (4 * r.directions * r.batch * r.channels())))),
        sequences_each(
            std::max<int64_t>(1, std::min(ROWS_EACH, (r.batch * r.directions + threads - 1) / threads))),
        products(r.directions * chunk * r.batch * r.channels()),
        input_bytes(threads * 2 * ROWS_EACH * whole_vectors(depth)),
        input_scales(threads * ROWS_EACH),
        states(r.directions * r.batch * whole_vectors(r.width())),
        state_bytes(2 * r.directions * r.batch * whole_vectors(r.width())),
        state_scales(r.directions * r.batch),
        cell_states(r.directions * r.batch * r.blocks() * 16),
        outputs(cell_states.size()),
        output_bytes(r.projected ? 2 * cell_states.size() : 0),
        output_scales(r.projected ? state_scales.size() : 0) {}

  void run(int threads) {
    begin();
    for (int64_t first = 0; first < r.steps; first += chunk) {
      const int64_t count = std::min(chunk, r.steps - first), rows = count * r.batch;
      const int64_t row_tasks = (rows + ROWS_EACH - 1) / ROWS_EACH;
      const int64_t sequence_tasks = (r.batch + sequences_each - 1) / sequences_each;
      const int64_t each =
          2 * rows * r.directions * r.channels();  // products of bytes for each value of a row
      in_parallel(threads_for(each * depth, row_tasks * r.directions, threads), row_tasks * r.directions,
                  [&](int thread, int64_t task, int64_t stop) {
                    for (; task < stop; ++task)
                      multiply_inputs(thread, task / row_tasks, task % row_tasks, first, count);
                  });
      in_parallel(threads_for(each * r.width(), sequence_tasks * r.directions, threads),
                  sequence_tasks * r.directions, [&](int, int64_t task, int64_t stop) {
                    for (; task < stop; ++task)
                      go_on(task / sequence_tasks, task % sequence_tasks * sequences_each, first, count);
                  });
    }
    end();
  }

 private:
  Digits state_digits() { return {state_bytes.data(), state_scales.data(), whole_vectors(r.width())}; }
  Digits output_digits() { return {output_bytes.data(), output_scales.data(), r.blocks() * 16}; }
  // Of a direction, what is read at a step.
  int64_t place(int64_t direction, int64_t step) const { return direction ? r.steps - 1 - step : step; }
  // The first and the last layer have the caller's order of steps and sequences, those between the first
  // order.
  int64_t row_at(bool callers, int64_t time, int64_t sequence) const {
    return callers && r.batch_first ? sequence * r.steps + time : time * r.batch + sequence;
  }

  void begin() {
    const int64_t width = r.width(), line = whole_vectors(width), hidden = r.blocks() * 16;
    const int64_t all = r.directions * r.batch;
    for (int64_t i = 0; i < all; ++i) {
      const int64_t given = layer * all + i;
      std::memcpy(&states[i * line], r.first_hidden + given * width, 4 * width);
      state_digits().set(i, &states[i * line], width);
      if (r.first_cell) std::memcpy(&cell_states[i * hidden], r.first_cell + given * r.hidden, 4 * r.hidden);
    }
  }

  void end() {
    const int64_t width = r.width(), line = whole_vectors(width), all = r.directions * r.batch;
    for (int64_t i = 0; i < all; ++i) {
      const int64_t given = layer * all + i;
      std::memcpy(r.last_hidden + given * width, &states[i * line], 4 * width);
      if (r.last_cell)
        std::memcpy(r.last_cell + given * r.hidden, &cell_states[i * r.blocks() * 16], 4 * r.hidden);
    }
  }

  float* product_of(int64_t direction, int64_t row) {
    return &products[(direction * chunk * r.batch + row) * r.channels()];
  }

  // Products of inputs, for rows of a chunk: steps in the order of the direction, and sequences within them.
  void multiply_inputs(int thread, int64_t direction, int64_t task, int64_t first, int64_t count) {
    const Matrix& matrix = cells[direction].input;
    const int64_t begin = task * ROWS_EACH, rows = std::min(ROWS_EACH, count * r.batch - begin);
    const int64_t line = whole_vectors(depth);
    const Digits digits = {&input_bytes[thread * 2 * ROWS_EACH * line], &input_scales[thread * ROWS_EACH],
                           line};
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t time = place(direction, first + (begin + i) / r.batch);
      digits.set(i, from + row_at(is_first, time, (begin + i) % r.batch) * depth, depth);
    }
    const int most = r.rows_of_tile(), gates = r.gates;
    for (int64_t block = 0; block < r.blocks(); ++block) {
      const int64_t channel = block * 16 * gates;
      for (int64_t at = 0; at < rows; at += most) {
        alignas(64) __m512i sums[MOST_SUMS];
        const int tile = static_cast<int>(std::min<int64_t>(most, rows - at));
        sum_digits(digits, at, tile, matrix, channel, gates, sums);
        for (int i = 0; i < tile; ++i)
          for (int gate = 0; gate < gates; ++gate) {
            const int64_t lane = channel + 16 * gate;
            const __m512 real = real_of(sums, gates, i, gate, digits.scale[at + i], matrix.scale + lane);
            _mm512_storeu_ps(product_of(direction, begin + at + i) + lane,
                             _mm512_add_ps(real, _mm512_loadu_ps(matrix.bias + lane)));
          }
      }
    }
  }

  // Steps of a chunk, for some sequences of a direction.
  void go_on(int64_t direction, int64_t sequence, int64_t first, int64_t count) {
    const int64_t stop = std::min(sequence + sequences_each, r.batch);
    const auto tile = r.gates == LSTM_GATES ? &Layer::one_tile<LSTM_GATES> : &Layer::one_tile<GRU_GATES>;
    for (int64_t step = 0; step < count; ++step) {
      for (int64_t block = 0; block < r.blocks(); ++block)
        for (int64_t at = sequence; at < stop; at += r.rows_of_tile())
          (this->*tile)(direction, step, block, at,
                        static_cast<int>(std::min<int64_t>(r.rows_of_tile(), stop - at)));
      if (r.projected) project(direction, sequence, stop);
      for (int64_t at = sequence; at < stop; ++at) keep(direction, place(direction, first + step), at);
    }
  }

  // 16 units of a few sequences.
  template <int GATES_EACH>
  void one_tile(int64_t direction, int64_t step, int64_t block, int64_t at, int rows) {
    alignas(64) __m512i sums[MOST_SUMS];
    const Matrix& matrix = cells[direction].hidden;
    const int64_t channel = block * 16 * GATES_EACH, state = direction * r.batch + at,
                  units = r.blocks() * 16;
    sum_digits(state_digits(), state, rows, matrix, channel, GATES_EACH, sums);
    for (int i = 0; i < rows; ++i) {
      __m512 inputs[GATES_EACH], own[GATES_EACH];
      const float* product = product_of(direction, step * r.batch + at + i) + channel;
      for (int gate = 0; gate < GATES_EACH; ++gate) {
        const int64_t lane = channel + 16 * gate;
        const __m512 real = real_of(sums, GATES_EACH, i, gate, state_scales[state + i], matrix.scale + lane);
        own[gate] = _mm512_add_ps(real, _mm512_loadu_ps(matrix.bias + lane));
        inputs[gate] = _mm512_loadu_ps(product + 16 * gate);
      }
      float* output = &outputs[(state + i) * units + block * 16];
      if constexpr (GATES_EACH == LSTM_GATES) {
        float* cell = &cell_states[(state + i) * units + block * 16];
        const __m512 entry = logistic(_mm512_add_ps(inputs[0], own[0]));
        const __m512 kept = logistic(_mm512_add_ps(inputs[1], own[1]));
        const __m512 fresh = hyperbolic_tangent(_mm512_add_ps(inputs[2], own[2]));
        const __m512 leave = logistic(_mm512_add_ps(inputs[3], own[3]));
        const __m512 now = _mm512_fmadd_ps(kept, _mm512_loadu_ps(cell), _mm512_mul_ps(entry, fresh));
        _mm512_storeu_ps(cell, now);
        _mm512_storeu_ps(output, _mm512_mul_ps(leave, hyperbolic_tangent(now)));
      } else {
        const __m512 before = _mm512_loadu_ps(&states[(state + i) * units + block * 16]);
        const __m512 reset = logistic(_mm512_add_ps(inputs[0], own[0]));
        const __m512 update = logistic(_mm512_add_ps(inputs[1], own[1]));
        const __m512 fresh = hyperbolic_tangent(_mm512_fmadd_ps(reset, own[2], inputs[2]));
        _mm512_storeu_ps(output, _mm512_fmadd_ps(update, _mm512_sub_ps(before, fresh), fresh));
      }
    }
  }

  void project(int64_t direction, int64_t sequence, int64_t stop) {
    const Matrix& matrix = cells[direction].projection;
    const int64_t line = whole_vectors(r.width()), vectors = line / 16, units = r.blocks() * 16;
    const Digits digits = output_digits();
    const int most = MOST_ROWS[WIDEST] / 2;
    for (int64_t at = sequence; at < stop; ++at)
      digits.set(direction * r.batch + at, &outputs[(direction * r.batch + at) * units], r.hidden);
    for (int64_t vector = 0; vector < vectors; vector += WIDEST) {
      const int width = static_cast<int>(std::min<int64_t>(WIDEST, vectors - vector));
      for (int64_t at = sequence; at < stop; at += most) {
        alignas(64) __m512i sums[MOST_SUMS];
        const int rows = static_cast<int>(std::min<int64_t>(most, stop - at));
        const int64_t state = direction * r.batch + at;
        sum_digits(digits, state, rows, matrix, vector * 16, width, sums);
        for (int i = 0; i < rows; ++i)
          for (int j = 0; j < width; ++j) {
            const int64_t lane = (vector + j) * 16;
            const __m512 real = real_of(sums, width, i, j, digits.scale[state + i], matrix.scale + lane);
            _mm512_storeu_ps(&states[(state + i) * line + lane], real);
          }
      }
    }
  }

  // A state becomes an output, and digits for the next step.
  void keep(int64_t direction, int64_t time, int64_t sequence) {
    const int64_t state = direction * r.batch + sequence, width = r.width();
    float* kept = &states[state * whole_vectors(width)];
    if (!r.projected) std::memcpy(kept, &outputs[state * r.blocks() * 16], 4 * width);
    state_digits().set(state, kept, width);
    std::memcpy(to + (row_at(is_last, time, sequence) * r.directions + direction) * width, kept, 4 * width);
  }

  const Recurrent& r;
  const int64_t layer;
  const Cell* cells;
  const int64_t depth;
  const bool is_first, is_last;
  const float* from;
  float* to;
  const int64_t chunk, sequences_each;
  std::vector<float> products;
  std::vector<uint8_t> input_bytes;
  std::vector<float> input_scales, states;
  std::vector<uint8_t> state_bytes;
  std::vector<float> state_scales, cell_states, outputs;
  std::vector<uint8_t> output_bytes;
  std::vector<float> output_scales;
};

inline void recurrent(const Recurrent& r, int available) {
  if (r.batch == 0 || r.hidden == 0) return;
  const int64_t between = r.layers > 1 ? r.steps * r.batch * r.directions * r.width() : 0;
  std::vector<float> even(between), odd(r.layers > 2 ? between : 0);
  std::vector<Cell> cells(r.directions);
  const float* from = r.x;
  Totals at;
  for (int64_t layer = 0; layer < r.layers; ++layer) {
    for (Cell& cell : cells) cell = next_cell(r, layer, at);
    float* to = layer + 1 == r.layers ? r.out : (layer % 2 ? odd : even).data();
    Layer(r, layer, cells.data(), from, to, std::max(1, available)).run(std::max(1, available));
    from = to;
  }
}

}  // namespace qompose_x86
