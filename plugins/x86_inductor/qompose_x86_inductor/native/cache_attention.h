// SPDX-License-Identifier: Apache-2.0
// Attention of few floats, the queries, to rows of bytes, each with a scale, or of floats. Nothing is packed:
// with few rows of scores, that would take longer than all else. With it, attention of floats is whole.
#pragma once

#include "float_attention.h"

namespace qompose_x86 {

struct CacheAttention : Heads {
  Strided<float> q;
  Strided<int8_t> k, v;  // columns lie side by side
  Strided<float> k_scales, v_scales;
  float scale;
};

inline float key_scale(const CacheAttention& a, int64_t batch, int64_t head, int64_t key) {
  return *a.k_scales.at(batch, head, key);
}
inline float value_scale(const CacheAttention& a, int64_t batch, int64_t head, int64_t key) {
  return *a.v_scales.at(batch, head, key);
}
inline float key_scale(const FloatAttention&, int64_t, int64_t, int64_t) { return 1; }
inline float value_scale(const FloatAttention&, int64_t, int64_t, int64_t) { return 1; }
inline Floats floats_at(const int8_t* from, int64_t count) {
  return to_floats(widened_signed(first_lanes(count), from));
}
inline Floats floats_at(const float* from, int64_t count) {
  return count >= LANES ? load(from) : load(first_lanes(count), from);
}

// `Description`: CacheAttention, or FloatAttention whose columns lie side by side.
template <typename Description>
class AttendingRows : public RowsOfFloats {
 public:
  struct Scratch {
    float *queries, *scores, *sums;
    Scratch(const Description& a, Parts& parts)
        : queries(parts.next<float>(a.rows_at_once() * rounded_up(a.width, LANES))),
          scores(parts.next<float>(a.rows_at_once() * a.row_keys())),
          sums(parts.next<float>(a.rows_at_once() * rounded_up(a.value_width, LANES))) {}
  };

  AttendingRows(const Description& a, const Scratch& s, void* out)
      : RowsOfFloats(a, s.scores, s.sums, out), a(a), queries(s.queries), line(rounded_up(a.width, LANES)) {}

  void pack(int64_t batch, int64_t shared) {
    this->batch = batch;
    head = shared;
  }

  void score(int64_t batch, int64_t query_head, int64_t row, int rows, int64_t used) {
    for (int r = 0; r < rows; ++r)
      for (int64_t i = 0; i < line; ++i)
        queries[r * line + i] = i < a.width ? *a.q.at(batch, query_head, row + r, i) : 0;
    for (int64_t key = 0; key < used; ++key) {
      const auto* from = a.k.at(batch, head, key);
      const float factor = a.scale * key_scale(a, batch, head, key);
      for (int r = 0; r < rows; ++r) {
        Floats sum = floats(0);
        for (int64_t i = 0; i < a.width; i += LANES)
          sum = fmadd(floats_at(from + i, a.width - i), load(queries + r * line + i), sum);
        scores[r * row_keys + key] = factor * sum_of_lanes(sum);
      }
    }
  }

  void gather(int rows, int64_t used) {
    for (int r = 0; r < rows; ++r) {
      int64_t first = 0;
      for (; first + 4 * LANES <= columns; first += 4 * LANES) gather_columns<4>(r, used, first);
      for (; first < columns; first += LANES) gather_columns<1>(r, used, first);
    }
  }

 private:
  template <int VECTORS>
  void gather_columns(int r, int64_t used, int64_t first) {
    Floats total[VECTORS], some[VECTORS];
    for (Floats& sum : total) sum = floats(0);
    for (int64_t start = 0; start < used; start += KEYS_AT_ONCE) {
      for (Floats& sum : some) sum = floats(0);
      for (int64_t key = start; key < std::min(start + KEYS_AT_ONCE, used); ++key) {
        const Floats weight = floats(scores[r * row_keys + key] * value_scale(a, batch, head, key));
        const auto* from = a.v.at(batch, head, key, first);
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; ++j)
          some[j] = fmadd(weight, floats_at(from + j * LANES, a.value_width - first - j * LANES), some[j]);
      }
      for (int j = 0; j < VECTORS; ++j) total[j] = add(total[j], some[j]);
    }
    for (int j = 0; j < VECTORS; ++j) store(sums + r * columns + first + j * LANES, total[j]);
  }

  const Description& a;
  float* queries;
  const int64_t line;
  int64_t batch = 0, head = 0;
};

inline void attend(const CacheAttention& a, void* out, int available) {
  attend_with<AttendingRows<CacheAttention>>(a, products_each(a), out, available);
}

constexpr int64_t FEW_QUERIES = 8;  // for which packing keys and values of floats does not pay

inline bool side_by_side(int64_t columns, const Strided<float>& rows) {
  return columns <= 1 || rows.strides[3] == 1;
}

inline void attend(const FloatAttention& a, void* out, int available) {
  if (a.queries <= FEW_QUERIES && side_by_side(a.width, a.k) && side_by_side(a.value_width, a.v))
    attend_with<AttendingRows<FloatAttention>>(a, products_each(a), out, available);
  else
    attend_with<AttendingFloats>(a, products_each(a), out, available);
}

}  // namespace qompose_x86
