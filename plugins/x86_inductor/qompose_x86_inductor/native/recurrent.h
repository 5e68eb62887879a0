// SPDX-License-Identifier: Apache-2.0
// Layers of LSTM and GRU: int8 weights, and inputs and states that are quantized row by row
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
  RECURRENT_LANES,
  RECURRENT_SIZES
};

constexpr int LSTM_GATES = 4, GRU_GATES = 3;
constexpr int64_t ROWS_EACH = 24;            // of a task: whole tiles of two digits by any number of gates
constexpr int64_t GATE_BYTES = 4 << 20;      // of products of inputs that are kept for the steps to come
constexpr float LARGEST_DIGITS = 127 * 256;  // whose digits are in -127..127 and -128..127
constexpr float LEAST_RANGE = 1e-30f;

inline int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// A weight of as many rows as `start` and `scale` have values, whole vectors, packed in panels of `width`
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
  int64_t blocks() const { return (hidden + LANES - 1) / LANES; }
  int64_t channels() const { return blocks() * LANES * gates; }
  int64_t depth_of(int64_t layer) const { return layer == 0 ? input_width : width() * directions; }
  int rows_of_tile() const { return MOST_ROWS[gates] / 2; }
};

// Bytes, sums and values of what `recurrent.pack` makes.
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
    Ints most = ints(0);  // as integers: NaN counts as more than any number
    for (int64_t i = 0; i < count; i += LANES)
      most = largest(most, both(bits_of(load(first_lanes(count - i), from + i)), ints(0x7fffffff)));
    int32_t bits[LANES];
    store_ints(bits, most);
    float range;
    std::memcpy(&range, std::max_element(bits, bits + LANES), 4);
    const bool finite = range <= std::numeric_limits<float>::max();
    range = finite ? std::max(range, LEAST_RANGE) : 1;
    scale[row] = finite ? range / LARGEST_DIGITS : std::numeric_limits<float>::quiet_NaN();
    const Floats inverse = floats(LARGEST_DIGITS / range), bound = floats(LARGEST_DIGITS);
    for (int64_t i = 0; i < count; i += LANES) {
      Floats value = mul(load(first_lanes(count - i), from + i), inverse);
      value = min(bound, max(sub(floats(0), bound), value));
      const Ints whole = to_ints(value), middle = ints(128);
      const Ints upper = shifted_right(add(whole, middle), 8);
      const Ints lower = sub(whole, shifted_left(upper, 8));
      store_lowest(high + i, add(upper, middle));
      store_lowest(low + i, add(lower, middle));
    }
  }
};

// Sums of a tile: two rows of digits for each row of floats.
QOMPOSE_INLINE void sum_digits(const Digits& digits, int64_t row, int rows, const Matrix& matrix,
                               int64_t channel, int width, Ints* sums) {
  Bytes where[2 * 6];
  for (int each = 0; each < 2 * rows; ++each) where[each] = digits.bytes + (2 * row + each) * digits.line;
  const int64_t quads = matrix.quads();
  tile_of<SumTile>(width, 2 * rows)({where, 0, 1, quads}, matrix.weights + channel * quads * 4,
                                    matrix.start + channel, sums);
}

// A vector of a tile in units.
QOMPOSE_INLINE Floats real_of(const Ints* sums, int width, int row, int vector, float step,
                              const float* scale) {
  const Floats high = to_floats(sums[2 * row * width + vector]);
  const Floats low = to_floats(sums[(2 * row + 1) * width + vector]);
  return mul(fmadd(high, floats(256), low), mul(floats(step), load(scale)));
}

QOMPOSE_INLINE Floats hyperbolic_tangent(Floats x) { return apply<TANH>(x, 0); }

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
        cell_states(r.directions * r.batch * r.blocks() * LANES),
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
  Digits output_digits() { return {output_bytes.data(), output_scales.data(), r.blocks() * LANES}; }
  // Of a direction, what is read at a step.
  int64_t place(int64_t direction, int64_t step) const { return direction ? r.steps - 1 - step : step; }
  // The first and the last layer have the caller's order of steps and sequences, those between the first
  // order.
  int64_t row_at(bool callers, int64_t time, int64_t sequence) const {
    return callers && r.batch_first ? sequence * r.steps + time : time * r.batch + sequence;
  }

  void begin() {
    const int64_t width = r.width(), line = whole_vectors(width), hidden = r.blocks() * LANES;
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
        std::memcpy(r.last_cell + given * r.hidden, &cell_states[i * r.blocks() * LANES], 4 * r.hidden);
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
      const int64_t channel = block * LANES * gates;
      for (int64_t at = 0; at < rows; at += most) {
        alignas(64) Ints sums[MOST_SUMS];
        const int tile = static_cast<int>(std::min<int64_t>(most, rows - at));
        sum_digits(digits, at, tile, matrix, channel, gates, sums);
        for (int i = 0; i < tile; ++i)
          for (int gate = 0; gate < gates; ++gate) {
            const int64_t lane = channel + LANES * gate;
            const Floats real = real_of(sums, gates, i, gate, digits.scale[at + i], matrix.scale + lane);
            store(product_of(direction, begin + at + i) + lane, add(real, load(matrix.bias + lane)));
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

  // A vector of units, of a few sequences.
  template <int GATES_EACH>
  void one_tile(int64_t direction, int64_t step, int64_t block, int64_t at, int rows) {
    alignas(64) Ints sums[MOST_SUMS];
    const Matrix& matrix = cells[direction].hidden;
    const int64_t channel = block * LANES * GATES_EACH, state = direction * r.batch + at,
                  units = r.blocks() * LANES;
    sum_digits(state_digits(), state, rows, matrix, channel, GATES_EACH, sums);
    for (int i = 0; i < rows; ++i) {
      Floats inputs[GATES_EACH], own[GATES_EACH];
      const float* product = product_of(direction, step * r.batch + at + i) + channel;
      for (int gate = 0; gate < GATES_EACH; ++gate) {
        const int64_t lane = channel + LANES * gate;
        const Floats real = real_of(sums, GATES_EACH, i, gate, state_scales[state + i], matrix.scale + lane);
        own[gate] = add(real, load(matrix.bias + lane));
        inputs[gate] = load(product + LANES * gate);
      }
      float* output = &outputs[(state + i) * units + block * LANES];
      if constexpr (GATES_EACH == LSTM_GATES) {
        float* cell = &cell_states[(state + i) * units + block * LANES];
        const Floats entry = logistic(add(inputs[0], own[0]));
        const Floats kept = logistic(add(inputs[1], own[1]));
        const Floats fresh = hyperbolic_tangent(add(inputs[2], own[2]));
        const Floats leave = logistic(add(inputs[3], own[3]));
        const Floats now = fmadd(kept, load(cell), mul(entry, fresh));
        store(cell, now);
        store(output, mul(leave, hyperbolic_tangent(now)));
      } else {
        const Floats before = load(&states[(state + i) * units + block * LANES]);
        const Floats reset = logistic(add(inputs[0], own[0]));
        const Floats update = logistic(add(inputs[1], own[1]));
        const Floats fresh = hyperbolic_tangent(fmadd(reset, own[2], inputs[2]));
        store(output, fmadd(update, sub(before, fresh), fresh));
      }
    }
  }

  void project(int64_t direction, int64_t sequence, int64_t stop) {
    const Matrix& matrix = cells[direction].projection;
    const int64_t line = whole_vectors(r.width()), vectors = line / LANES, units = r.blocks() * LANES;
    const Digits digits = output_digits();
    const int most = MOST_ROWS[WIDEST] / 2;
    for (int64_t at = sequence; at < stop; ++at)
      digits.set(direction * r.batch + at, &outputs[(direction * r.batch + at) * units], r.hidden);
    for (int64_t vector = 0; vector < vectors; vector += WIDEST) {
      const int width = static_cast<int>(std::min<int64_t>(WIDEST, vectors - vector));
      for (int64_t at = sequence; at < stop; at += most) {
        alignas(64) Ints sums[MOST_SUMS];
        const int rows = static_cast<int>(std::min<int64_t>(most, stop - at));
        const int64_t state = direction * r.batch + at;
        sum_digits(digits, state, rows, matrix, vector * LANES, width, sums);
        for (int i = 0; i < rows; ++i)
          for (int j = 0; j < width; ++j) {
            const int64_t lane = (vector + j) * LANES;
            const Floats real = real_of(sums, width, i, j, digits.scale[state + i], matrix.scale + lane);
            store(&states[(state + i) * line + lane], real);
          }
      }
    }
  }

  // A state becomes an output, and digits for the next step.
  void keep(int64_t direction, int64_t time, int64_t sequence) {
    const int64_t state = direction * r.batch + sequence, width = r.width();
    float* kept = &states[state * whole_vectors(width)];
    if (!r.projected) std::memcpy(kept, &outputs[state * r.blocks() * LANES], 4 * width);
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
