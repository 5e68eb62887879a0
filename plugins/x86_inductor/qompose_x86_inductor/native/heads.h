// SPDX-License-Identifier: Apache-2.0
// What attention of bytes and of floats have in common: sizes, masks, and which thread works on which rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "lanes.h"
#include "threads.h"

namespace qompose_x86 {

enum MaskKind : int { NO_MASK, KEEP, ADDED };  // of bytes: which keys count; of floats: added to scores

// A tensor of four axes, (batch, heads, rows, columns), with its strides in elements; 0 where it repeats.
template <typename T>
struct Strided {
  const T* data;
  int64_t strides[4];
  int64_t offset(int64_t batch, int64_t head, int64_t row, int64_t column) const {
    return batch * strides[0] + head * strides[1] + row * strides[2] + column * strides[3];
  }
  const T* at(int64_t batch, int64_t head, int64_t row, int64_t column = 0) const {
    return data + offset(batch, head, row, column);
  }
};

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr int TALLEST = 12;  // rows of scores at a time, where they are not too long

inline int64_t rounded_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

struct Heads {
  int64_t batches, heads, shared_heads;  // of queries; of keys and values, each for a group of the others
  int64_t queries, keys, width, value_width;
  MaskKind mask_kind;
  Strided<uint8_t> mask;  // floats, where they are added
  bool causal;
  float hidden = -INFINITE;  // the score of a key that a mask of bytes hides
  bool safe_softmax = true;  // a row all of whose scores are -inf is 0; without, it is NaN

  int64_t row_keys() const { return rounded_up(keys, 64); }  // of a row of scores in memory
  int64_t rows_at_once() const { return rows_within(1 << 16); }
  int64_t rows_within(int64_t scores) const {
    return std::min<int64_t>(TALLEST, std::max<int64_t>(1, scores / rounded_up(keys + 1, 64)));
  }
  // Keys that count for some of the rows before `end`.
  int64_t keys_until(int64_t end) const { return causal ? std::min(keys, end) : keys; }

  // Mask scores of a row, -inf where a key does not count, and return the largest; NaN if the mask makes one
  // NaN or infinite. What a mask of bytes hides gets `hidden`.
  float mask_row(float* scores, int64_t batch, int64_t head, int64_t row, int64_t used) const {
    const int64_t end = keys_until(row + 1);
    if (mask_kind == ADDED) add_mask(scores, mask.offset(batch, head, row, 0), end);
    if (mask_kind == KEEP) keep(scores, mask.at(batch, head, row), end);
    for (int64_t i = end; i < rounded_up(used, 16); ++i) scores[i] = -INFINITE;
    if (mask_kind == ADDED && !all_usable(scores, used)) return std::numeric_limits<float>::quiet_NaN();
    Floats most = floats(-INFINITE);
    for (int64_t i = 0; i < used; i += LANES) most = max(most, load(scores + i));
    return largest_lane(most);
  }

 private:
  // These two change scores behind `end` as well, as far as a vector goes.
  void add_mask(float* scores, int64_t offset, int64_t end) const {
    const float* values = reinterpret_cast<const float*>(mask.data) + offset;
    const int64_t step = mask.strides[3];
    if (step == 1)
      for (int64_t i = 0; i < end; i += LANES)
        store(scores + i, add(load(scores + i), load(first_lanes(end - i), values + i)));
    else
      for (int64_t i = 0; i < end; ++i) scores[i] += values[i * step];
  }

  void keep(float* scores, const uint8_t* kept, int64_t end) const {
    const int64_t step = mask.strides[3];
    const Floats zero = floats(0), lowest = floats(hidden);
    if (step == 0 && end > 0 && *kept) return;  // one value for all keys
    if (step == 1)
      for (int64_t i = 0; i < end; i += LANES) {
        const Floats each = to_floats(widened_unsigned(first_lanes(end - i), kept + i));
        store(scores + i, where(less(zero, each), load(scores + i), lowest));
      }
    else
      for (int64_t i = 0; i < end; ++i) scores[i] = kept[i * step] ? scores[i] : hidden;
  }

  static bool all_usable(const float* scores, int64_t used) {
    Floats unusable = floats(0);
    for (int64_t i = 0; i < used; i += LANES)
      unusable = max(unusable, where(less(load(scores + i), floats(INFINITE)), floats(0), floats(1)));
    return largest_lane(unusable) == 0;
  }
};

// Parts of one piece of memory, each in cache lines of its own.
class Parts {
 public:
  explicit Parts(uint8_t* memory) : memory_(memory) {}
  template <typename T>
  T* next(int64_t count) {
    uint8_t* start = memory_ + size_;
    size_ += rounded_up(count * sizeof(T), 64);
    return reinterpret_cast<T*>(start);
  }
  int64_t size() const { return size_; }

 private:
  uint8_t* memory_;
  int64_t size_ = 0;
};

// Rows `from` to `to` of the queries of heads, one head after another. Heads that share keys and values have
// them packed once.
template <typename Kernel>
class RowsOfHeads {
 public:
  RowsOfHeads(const Heads& a, int64_t rows_at_once, Kernel& kernel)
      : a(a), tall(rows_at_once), kernel(kernel) {}

  void work(int64_t batch, int64_t head, int64_t from, int64_t to) {
    const int64_t shared = head / (a.heads / a.shared_heads);
    if (batch != packed_batch || shared != packed_head) kernel.pack(batch, shared);
    packed_batch = batch;
    packed_head = shared;
    float totals[TALLEST];
    for (int64_t row = from; row < to; row += tall) {
      const int rows = static_cast<int>(std::min(tall, to - row));
      const int64_t used = a.keys_until(row + rows);
      kernel.score(batch, head, row, rows, used);
      for (int r = 0; r < rows; ++r) totals[r] = kernel.weigh(batch, head, row + r, r, used);
      kernel.gather(rows, used);
      for (int r = 0; r < rows; ++r) kernel.finish(batch, head, row + r, r, totals[r]);
    }
  }

 private:
  const Heads& a;
  const int64_t tall;
  Kernel& kernel;
  int64_t packed_batch = -1, packed_head = -1;
};

// Compute attention of all rows of all heads. The result is (batch, queries, heads, columns), contiguous.
//
// `products`: of bytes, that take as long as a query and a key. `Kernel`: has `Kernel::Scratch`, which is
// made of a description and `Parts`, and for rows of a head, of which the first `used` keys count,
//   pack(batch, shared head): arrange keys and values;
//   score(batch, head, row, rows, used);
//   weigh(batch, head, row, r, used): make probabilities of the scores of row `row`, the r-th of these, and
//     return what divides its result, 0 where it has none;
//   gather(rows, used): sum values;
//   finish(batch, head, row, r, total): write the result of a row.
template <typename Kernel, typename Description>
void attend_with(const Description& a, int64_t products, void* out, int available) {
  const int64_t heads = a.batches * a.heads, tall = a.rows_at_once(), blocks = (a.queries + tall - 1) / tall;
  if (heads * blocks * a.value_width == 0) return;
  const int threads = threads_for(heads * a.queries * a.keys * products, heads * blocks, available);
  const int64_t parts = std::min(blocks, (threads + heads - 1) / heads);  // of a head's rows
  Parts measured(nullptr);
  typename Kernel::Scratch(a, measured);
  const int64_t size = measured.size();
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[size * threads + 64]);  // a vector would fill it
  uint8_t* start = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
  const auto attend = [&](int thread, int64_t from, int64_t to) {
    Parts own(start + thread * size);
    Kernel kernel(a, typename Kernel::Scratch(a, own), out);
    RowsOfHeads<Kernel> rows(a, tall, kernel);
    for (int64_t unit = from; unit < to; ++unit) {
      const int64_t head = unit / parts, part = unit % parts;
      rows.work(head / a.heads, head % a.heads, blocks * part / parts * tall,
                std::min(a.queries, blocks * (part + 1) / parts * tall));
    }
  };
  in_parallel(threads, heads * parts, attend, 1);  // heads of a group share keys that are packed
}

}  // namespace qompose_x86
