// SPDX-License-Identifier: Apache-2.0
// Linears by weights of four or eight bits, with scales for groups of inputs, as native/packed_linear.py
// packs them. Inputs are floats, or quantized here, each row with a scale of its own. With AVX2 or AVX-512
// the latter are multiplied as bytes; elsewhere as floats, whose sums may round.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "packed_many_rows.h"

namespace qompose_x86 {
namespace packed {

// -- few rows, which are multiplied as they are
// Floats: weights are made floats in registers.
template <int BITS>
struct OfFloats {
  using Sum = Floats;
  static QOMPOSE_INLINE const float* inputs(const Rows& rows) { return rows.x; }

  // What the zero point of a group adds to the sums of a row.
  static QOMPOSE_INLINE Floats start(const Linear& p, const Rows& rows, int64_t m, int64_t panel, int64_t g) {
    if (!p.zero_points) return all(0);
    return madd(to_floats(zero_points_of(p, panel, g)), all(-rows.float_sums[m * p.groups() + g]), all(0));
  }
  static QOMPOSE_INLINE Floats real(Floats sum) { return sum; }

  template <int ROWS, int PANELS>
  static QOMPOSE_INLINE void add(const Ints* lanes, const float* const* x, int64_t k, int j,
                                 Floats (&sums)[ROWS][PANELS]) {
#pragma GCC unroll 16
    for (int i = 0; i < UNIT; ++i) {
      const Floats w = value<BITS>(lanes, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) sums[r][j] = madd(w, all(x[r][k + i]), sums[r][j]);
    }
  }
};

#ifdef QOMPOSE_BYTES
// Bytes: weights are made unsigned.
template <int BITS>
struct OfBytes {
  using Sum = Ints;
  static QOMPOSE_INLINE const int8_t* inputs(const Rows& rows) { return rows.integers.data(); }

  static QOMPOSE_INLINE Ints start(const Linear& p, const Rows& rows, int64_t m, int64_t panel, int64_t g) {
    Ints zero = all_ints(1 << (BITS - 1));  // the unsigned number of the weight 0
    if (p.zero_points) zero = added(zero, zero_points_of(p, panel, g));
    return multiplied(zero, all_ints(-rows.sums[m * p.groups() + g]));
  }
  static QOMPOSE_INLINE Floats real(Ints sum) { return to_floats(sum); }

  template <int ROWS, int PANELS>
  static QOMPOSE_INLINE void add(const Ints* lanes, const int8_t* const* x, int64_t k, int j,
                                 Ints (&sums)[ROWS][PANELS]) {
    Ints low = lanes[0], high;
    if constexpr (BITS == 4) {
      const Ints mask = all_ints(0x0f0f0f0f);
      high = both(words_right<4>(low), mask);
      low = both(low, mask);
    } else {
      const Ints sign = all_ints(static_cast<int32_t>(0x80808080));
      high = differing(lanes[1], sign);
      low = differing(low, sign);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      int32_t four[2];
      std::memcpy(four, x[r] + k, 8);
      sums[r][j] = dot<BITS>(sums[r][j], low, all_ints(four[0]));
      sums[r][j] = dot<BITS>(sums[r][j], high, all_ints(four[1]));
    }
  }
};
#else
template <int BITS>
using OfBytes = OfFloats<BITS>;  // never reached: see BYTES
#endif

template <int BITS, bool BY_BYTES, int ROWS, int PANELS>
void tile(const Linear& p, const Rows& rows, int64_t m, int64_t panel) {
  using Of = std::conditional_t<BY_BYTES, OfBytes<BITS>, OfFloats<BITS>>;
  Floats total[ROWS][PANELS];
  decltype(Of::inputs(rows)) x[ROWS];
  const uint8_t* weight[PANELS];
  for (int r = 0; r < ROWS; ++r) {
    x[r] = Of::inputs(rows) + (m + r) * p.depth;
    for (int j = 0; j < PANELS; ++j) total[r][j] = all(0);
  }
  for (int j = 0; j < PANELS; ++j) weight[j] = p.weight_at(panel + j, 0);
  // A row alone waits for memory: panels are as long as a page or two, which the processor's own fetching
  // ends with. Behind the last panel this asks for memory of others, which is only a hint.
  const int64_t next = PANELS * p.depth / UNIT * p.unit_bytes();
  for (int64_t g = 0; g < p.groups(); ++g) {
    typename Of::Sum sums[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < PANELS; ++j) sums[r][j] = Of::start(p, rows, m + r, panel + j, g);
    for (int64_t k = g * p.group; k < (g + 1) * p.group; k += UNIT) {
#pragma GCC unroll 16
      for (int j = 0; j < PANELS; ++j) {
        Ints lanes[BITS / 4];
        for (int i = 0; i < BITS / 4; ++i) {
          lanes[i] = load_lanes(weight[j] + 64 * i);
          if constexpr (ROWS == 1) __builtin_prefetch(weight[j] + next + 64 * i);
        }
        weight[j] += LANES * BITS;
        Of::add(lanes, x, k, j, sums);
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < PANELS; ++j) {
      const Floats scale = scale_of(p, panel + j, g);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) total[r][j] = madd(Of::real(sums[r][j]), scale, total[r][j]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < PANELS; ++j) finish(p, rows, m + r, panel + j, total[r][j]);
}

// Rows `m` to the last, by tiles of at most ROWS, then of fewer.
template <int BITS, bool BY_BYTES, int ROWS, int PANELS>
void rows_of(const Linear& p, const Rows& rows, int64_t m, int64_t panel) {
  for (; m + ROWS <= p.rows; m += ROWS) tile<BITS, BY_BYTES, ROWS, PANELS>(p, rows, m, panel);
  if constexpr (ROWS > 1)
    if (m < p.rows) rows_of<BITS, BY_BYTES, ROWS / 2, PANELS>(p, rows, m, panel);
}

constexpr int64_t FEW = 12;  // rows of floats for which unpacking to memory does not pay

// Some panels of few rows.
template <int BITS>
void panels_of(const Linear& p, const Rows& rows, bool bytes, int64_t panel, int64_t end) {
  while (panel < end) {
    if (p.rows == 1 && panel + 4 <= p.panels()) {
      bytes ? tile<BITS, true, 1, 4>(p, rows, 0, panel) : tile<BITS, false, 1, 4>(p, rows, 0, panel);
      panel += 4;
    } else if (panel + 2 <= p.panels()) {
      bytes ? rows_of<BITS, true, 8, 2>(p, rows, 0, panel) : rows_of<BITS, false, 4, 2>(p, rows, 0, panel);
      panel += 2;
    } else {
      bytes ? rows_of<BITS, true, 8, 1>(p, rows, 0, panel) : rows_of<BITS, false, 4, 1>(p, rows, 0, panel);
      panel += 1;
    }
  }
}

// Linears that read the same rows, and differ in what they make of them alone.
using Linears = std::vector<Linear>;

template <int BITS>
void multiply(const Linears& linears, const Rows& rows, int threads) {
  const Linear& any = linears.front();
  const bool bytes = BYTES && any.mode != FLOATS;
  if (!bytes && any.rows >= FEW) {
    for (const Linear& p : linears)
      many_rows<BITS>(p, rows, threads_for(p.rows * p.depth * p.channels, p.panels(), threads));
    return;
  }
#ifdef __AVX512BW__
  if (bytes && any.rows >= MANY<BITS> &&
      std::none_of(linears.begin(), linears.end(), has_distant_zero_points))
    return many_rows_of_bytes<BITS>(linears, rows, threads);
#endif
  const int64_t wide = any.rows == 1 ? 4 : 2;
  const auto parts_of = [&](const Linear& p) { return (p.panels() + wide - 1) / wide; };
  int64_t parts = 0, channels = 0;
  for (const Linear& p : linears) parts += parts_of(p), channels += p.channels;
  threads = threads_for(any.rows * any.depth * channels, parts, threads);
  in_parallel(threads, parts, [&](int, int64_t from, int64_t to) {
    for (const Linear& p : linears) {
      const int64_t own = parts_of(p);
      panels_of<BITS>(p, rows, bytes, from * wide, std::min(std::min(to, own) * wide, p.panels()));
      from = std::max<int64_t>(from - own, 0);
      to = std::max<int64_t>(to - own, 0);
    }
  });
}

// Compute linears of `given` inputs, the rest of whose last unit are 0. May throw std::bad_alloc.
inline void compute(const Linears& linears, const float* x, int64_t given, int threads) {
  const auto asks_most = [](const Linear& p) { return p.zero_points != nullptr; };
  const auto found = std::find_if(linears.begin(), linears.end(), asks_most);
  const Rows rows = prepared(found == linears.end() ? linears.front() : *found, x, given, threads);
  linears.front().bits == 4 ? multiply<4>(linears, rows, threads) : multiply<8>(linears, rows, threads);
}

}  // namespace packed
}  // namespace qompose_x86
