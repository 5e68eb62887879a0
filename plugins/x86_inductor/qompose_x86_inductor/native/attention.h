// SPDX-License-Identifier: Apache-2.0
// Attention of unsigned bytes on AVX-512 VNNI: integer products, and a float32 softmax between them.
//
// Rows of scores are computed, made probabilities and multiplied by the values while they are in a core's
// cache. A probability is stored as e = exp(score - the row's largest) in 16 bits, as two bytes, and the sum
// of a row's e divides its result: small probabilities keep their shares, and their sum is 1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "heads.h"
#include "products.h"

namespace qompose_x86 {

struct Attention : Heads {
  Strided<uint8_t> q, k, v;
  int q_zp, v_zp;
  float scale;      // of scores, per integer
  float masked;     // the result of a row all of whose keys are masked: 0 or NaN
  float v_scale;    // in steps of the result, of floats in units
  float low, high;  // of steps
  int zp;
  Kind kind;
};

// The numbers of the operator, in the order in which attention.py gives them.
enum AttentionSize : int { Q_ZP, V_ZP, CAUSAL, SAFE, RESULT_ZP, RESULT_KIND };
enum AttentionEnd : int { SCORE_SCALE, VALUE_SCALE, LEAST, MOST };

inline Attention described(Attention a, const int64_t* s, const double* e) {
  const auto end = [e](AttentionEnd which) { return static_cast<float>(e[which]); };
  a.q_zp = static_cast<int>(s[Q_ZP]);
  a.v_zp = static_cast<int>(s[V_ZP]);
  a.scale = end(SCORE_SCALE);
  a.causal = s[CAUSAL] != 0;
  a.masked = s[SAFE] != 0 || a.keys == 0 ? 0 : std::numeric_limits<float>::quiet_NaN();
  a.v_scale = end(VALUE_SCALE);
  a.low = end(LEAST);
  a.high = end(MOST);
  a.zp = static_cast<int>(s[RESULT_ZP]);
  a.kind = static_cast<Kind>(s[RESULT_KIND]);
  return a;
}

constexpr int64_t MOST_KEYS = 65536;  // whose sums fit: 255 * 128 * keys below 2 ** 31
constexpr float WHOLE = 65535;        // e of the largest score

class Attending {
 public:
  // What one thread works in.
  struct Scratch {
    int8_t *keys, *values;
    int32_t* starts;  // of sums, by key: minus the share of the zero point of the queries
    uint8_t *rows, *high, *low;
    float *scores, *sums;
    Scratch(const Attention& a, Parts& parts)
        : keys(parts.next<int8_t>(a.row_keys() * rounded_up(a.width, 4))),
          values(parts.next<int8_t>(a.row_keys() * rounded_up(a.value_width, 16))),
          starts(parts.next<int32_t>(a.row_keys())),
          rows(parts.next<uint8_t>(a.rows_at_once() * rounded_up(a.width, 4))),
          high(parts.next<uint8_t>(a.rows_at_once() * a.row_keys())),
          low(parts.next<uint8_t>(a.rows_at_once() * a.row_keys())),
          scores(parts.next<float>(a.rows_at_once() * a.row_keys())),
          sums(parts.next<float>(a.rows_at_once() * rounded_up(a.value_width, 16))) {}
  };

  Attending(const Attention& a, const Scratch& s, void* out)
      : a(a),
        s(s),
        out(out),
        quads((a.width + 3) / 4),
        row_keys(a.row_keys()),
        value_vectors((a.value_width + 15) / 16) {}

  void pack(int64_t batch, int64_t head) {
    pack_keys(batch, head);
    pack_values(batch, head);
  }

  // Scores of some rows, in units.
  void score(int64_t batch, int64_t head, int64_t row, int rows, int64_t used) {
    const bool copied = a.q.strides[3] != 1 || a.width % 4 != 0;
    Bytes where[TALLEST];
    for (int r = 0; r < rows; ++r) {
      where[r] = a.q.at(batch, head, row + r);
      if (!copied) continue;
      uint8_t* to = s.rows + r * 4 * quads;
      for (int64_t c = 0; c < 4 * quads; ++c) to[c] = c < a.width ? where[r][c * a.q.strides[3]] : 0;
      where[r] = to;
    }
    for (int64_t first = 0; first < used; first += 64) {
      const int width = static_cast<int>(std::min<int64_t>(64, rounded_up(a.keys, 16) - first) / 16);
      for (int r = 0; r < rows; r += MOST_ROWS[width]) {
        const int some = std::min(MOST_ROWS[width], rows - r);
        tile_of<SumTile>(width, some)({where + r, 0, 1, quads}, s.keys + first * quads * 4, s.starts + first,
                                      tile);
        for (int i = 0; i < some; ++i)
          for (int j = 0; j < width; ++j)
            store(s.scores + (r + i) * row_keys + first + 16 * j,
                  mul(to_floats(tile[i * width + j]), floats(a.scale)));
      }
    }
  }

  // Make probabilities of a row of scores, and return what divides its result; 0: it has none.
  float weigh(int64_t batch, int64_t head, int64_t row, int r, int64_t used) {
    float* scores = s.scores + r * row_keys;
    const float most = a.mask_row(scores, batch, head, row, used);
    if (!(most > -INFINITE)) return most == -INFINITE ? 0 : most;
    uint8_t *high = s.high + r * row_keys, *low = s.low + r * row_keys;
    const __m512 shift = _mm512_set1_ps(most), whole = _mm512_set1_ps(WHOLE);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < used; i += 16) {
      const __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), shift));
      const __m512i steps = _mm512_cvtps_epi32(_mm512_mul_ps(e, whole));
      sum = _mm512_add_epi32(sum, steps);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(steps));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(steps, 8)));
    }
    return static_cast<float>(static_cast<uint32_t>(_mm512_reduce_add_epi32(sum)));
  }

  // Sums of probabilities and values, in units of both.
  void gather(int rows, int64_t used) {
    static const int32_t zeros[64] = {};
    const int64_t key_quads = (a.keys + 3) / 4, used_quads = (used + 3) / 4, columns = 16 * value_vectors;
    for (int64_t panel = 0; panel * WIDEST < value_vectors; ++panel) {
      const int width = width_of(panel);
      const int8_t* values = s.values + panel * 64 * key_quads * 4;
      for (int r = 0; r < rows; r += MOST_ROWS[width]) {
        const int some = std::min(MOST_ROWS[width], rows - r);
        Bytes high[TALLEST], low[TALLEST];
        for (int i = 0; i < some; ++i) {
          high[i] = s.high + (r + i) * row_keys;
          low[i] = s.low + (r + i) * row_keys;
        }
        const auto sum = tile_of<SumTile>(width, some);
        sum({high, 0, 1, used_quads}, values, zeros, tile);
        sum({low, 0, 1, used_quads}, values, zeros, low_tile);
        for (int i = 0; i < some; ++i)
          for (int j = 0; j < width; ++j) {
            const int at = i * width + j;
            const __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(tile[at]), _mm512_set1_ps(256),
                                                _mm512_cvtepi32_ps(low_tile[at]));
            _mm512_storeu_ps(s.sums + (r + i) * columns + panel * 64 + 16 * j, both);
          }
      }
    }
  }

  void finish(int64_t batch, int64_t head, int64_t row, int r, float total) {
    const int64_t at = ((batch * a.queries + row) * a.heads + head) * a.value_width;
    const bool blank = total == 0;
    const __m512 factor = _mm512_set1_ps(blank ? 0 : a.v_scale / total),
                 shift = _mm512_set1_ps(blank ? a.masked : (128 - a.v_zp) * a.v_scale);
    const float* sums = s.sums + r * 16 * value_vectors;
    for (int64_t column = 0; column < a.value_width; column += 16) {
      const int64_t left = a.value_width - column;
      const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
      // A row without probabilities multiplies what it has not written by 0: that may be NaN elsewhere.
      const __m512 sum = blank ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + column);
      __m512 value = _mm512_fmadd_ps(sum, factor, shift);
      if (a.kind == FLOAT32) {
        _mm512_mask_storeu_ps(static_cast<float*>(out) + at + column, mask, value);
        continue;
      }
      // Of NaN and a bound, these give the bound.
      value = _mm512_min_ps(_mm512_max_ps(value, _mm512_set1_ps(a.low)), _mm512_set1_ps(a.high));
      const __m512i steps = _mm512_add_epi32(_mm512_cvtps_epi32(value), _mm512_set1_epi32(a.zp));
      _mm_mask_storeu_epi8(static_cast<char*>(out) + at + column, mask, _mm512_cvtepi32_epi8(steps));
    }
  }

 private:
  // Four columns of a row, from `column` on; what is behind the last one is the middle of the integers.
  static uint32_t four(const Strided<uint8_t>& x, const uint8_t* row, int64_t column, int64_t width) {
    uint32_t word = 0x80808080;
    if (x.strides[3] == 1 && column + 4 <= width) {
      std::memcpy(&word, row + column, 4);
      return word;
    }
    uint8_t bytes[4] = {0x80, 0x80, 0x80, 0x80};
    for (int64_t i = 0; i < std::min<int64_t>(4, width - column); ++i)
      bytes[i] = row[(column + i) * x.strides[3]];
    std::memcpy(&word, bytes, 4);
    return word;
  }

  // As `SumTile` reads weights: [panel of 64 keys][quad of columns][key][4], as signed bytes.
  void pack_keys(int64_t batch, int64_t head) {
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80)), ones = _mm512_set1_epi8(1);
    for (int64_t first = 0; first < row_keys; first += 16) {
      const int64_t panel = first / 64 * 64,
                    vectors = (std::min<int64_t>(64, rounded_up(a.keys, 16) - panel)) / 16;
      if (first - panel >= 16 * vectors) break;
      int8_t* to = s.keys + panel * quads * 4 + (first - panel) * 4;
      const uint8_t* rows[16];
      const int count = static_cast<int>(std::min<int64_t>(16, a.keys - first));
      for (int i = 0; i < count; ++i) rows[i] = a.k.at(batch, head, first + i);
      __m512i sum = _mm512_setzero_si512();
      alignas(64) uint32_t words[16];
      for (uint32_t& word : words) word = 0x80808080;
      for (int64_t quad = 0; quad < quads; ++quad, to += 64 * vectors) {
        for (int i = 0; i < count; ++i) words[i] = four(a.k, rows[i], 4 * quad, a.width);
        const __m512i bytes = _mm512_xor_si512(_mm512_load_si512(words), flip);
        sum = _mm512_dpbusd_epi32(sum, ones, bytes);
        _mm512_storeu_si512(to, bytes);
      }
      _mm512_store_si512(s.starts + first, _mm512_mullo_epi32(sum, _mm512_set1_epi32(-a.q_zp)));
    }
  }

  // 16 columns of a row from `column` on, those that there are.
  __m128i columns(const uint8_t* row, int64_t column) const {
    const int64_t left = a.value_width - column;
    if (a.v.strides[3] == 1) {
      const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
      return _mm_maskz_loadu_epi8(mask, row + column);
    }
    alignas(16) uint8_t bytes[16] = {};
    for (int64_t i = 0; i < std::min<int64_t>(16, left); ++i) bytes[i] = row[(column + i) * a.v.strides[3]];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
  }

  // [panel of 64 columns][quad of keys][column][4], as signed bytes.
  void pack_values(int64_t batch, int64_t head) {
    const __m128i flip = _mm_set1_epi8(static_cast<char>(0x80));
    const int64_t key_quads = (a.keys + 3) / 4;
    for (int64_t quad = 0; quad < key_quads; ++quad) {
      const int count = static_cast<int>(std::min<int64_t>(4, a.keys - 4 * quad));
      const uint8_t* rows[4];
      for (int i = 0; i < count; ++i) rows[i] = a.v.at(batch, head, 4 * quad + i);
      for (int64_t vector = 0; vector < value_vectors; ++vector) {
        const int64_t panel = vector / WIDEST, vectors = width_of(panel);
        __m128i x[4];
        for (int i = 0; i < 4; ++i)
          x[i] = i < count ? _mm_xor_si128(columns(rows[i], 16 * vector), flip) : _mm_setzero_si128();
        const __m128i even = _mm_unpacklo_epi8(x[0], x[1]), odd = _mm_unpacklo_epi8(x[2], x[3]),
                      even_high = _mm_unpackhi_epi8(x[0], x[1]), odd_high = _mm_unpackhi_epi8(x[2], x[3]);
        int8_t* to = s.values + panel * 64 * key_quads * 4 + quad * 64 * vectors + vector % WIDEST * 64;
        auto* lanes = reinterpret_cast<__m128i*>(to);
        _mm_storeu_si128(lanes, _mm_unpacklo_epi16(even, odd));
        _mm_storeu_si128(lanes + 1, _mm_unpackhi_epi16(even, odd));
        _mm_storeu_si128(lanes + 2, _mm_unpacklo_epi16(even_high, odd_high));
        _mm_storeu_si128(lanes + 3, _mm_unpackhi_epi16(even_high, odd_high));
      }
    }
  }

  int width_of(int64_t panel) const {
    return static_cast<int>(std::min<int64_t>(WIDEST, value_vectors - panel * WIDEST));
  }

  const Attention& a;
  const Scratch s;
  void* out;
  const int64_t quads, row_keys, value_vectors;
  alignas(64) __m512i tile[MOST_SUMS], low_tile[MOST_SUMS];
};

inline void attend(const Attention& a, void* out, int available) {
  // An exponential takes as long as some products, and probabilities are multiplied twice.
  attend_with<Attending>(a, a.width + 2 * a.value_width + 64, out, available);
}

}  // namespace qompose_x86
