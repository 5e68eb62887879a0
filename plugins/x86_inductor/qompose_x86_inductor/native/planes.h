// SPDX-License-Identifier: Apache-2.0
// Quantization of float images of two to four channels, which lie plane by plane, to unsigned bytes by pixel.
#pragma once

#include <immintrin.h>

#include "threads.h"

namespace qompose_x86 {

constexpr int64_t MOST_PLANES = 4;
constexpr int64_t PRODUCTS_PER_VALUE = 16;  // that take as long as reading and rounding one value

struct Planes {
  const float* x;
  int64_t images, channels, pixels;  // pixels of one plane
  float inverse_scale;
  int zp, low, high;
};

// Each 32 bits hold the channels of a pixel: take their bytes together, 16 pixels at a time.
class Gathering {
 public:
  explicit Gathering(int channels) {
    alignas(64) int8_t within[64];
    alignas(64) int32_t across[16];
    for (int i = 0; i < 64; ++i) {
      const int to = i % 16;
      within[i] = to < 4 * channels ? static_cast<int8_t>(to / channels * 4 + to % channels) : -1;
    }
    for (int i = 0; i < 16; ++i) across[i] = i < 4 * channels ? i / channels * 4 + i % channels : 0;
    bytes_ = _mm512_load_si512(within);
    lanes_ = _mm512_load_si512(across);
  }
  __m512i operator()(__m512i pixels) const {
    return _mm512_permutexvar_epi32(lanes_, _mm512_shuffle_epi8(pixels, bytes_));
  }

 private:
  __m512i bytes_, lanes_;
};

inline __m512i steps_of(const Planes& p, const float* x, __mmask16 mask) {
  const __m512 low = _mm512_set1_ps(static_cast<float>(p.low - p.zp)),
               high = _mm512_set1_ps(static_cast<float>(p.high - p.zp));
  const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x), _mm512_set1_ps(p.inverse_scale));
  const __m512 kept = _mm512_min_ps(high, _mm512_max_ps(value, low));  // NaN, the first operand, gives `low`
  return _mm512_add_epi32(_mm512_cvtps_epi32(kept), _mm512_set1_epi32(p.zp));
}

inline void quantize_planes(const Planes& shared, uint8_t* out, int available) {
  const int64_t blocks = (shared.pixels + 15) / 16, units = shared.images * blocks;
  const int threads = threads_for(units * 16 * shared.channels * PRODUCTS_PER_VALUE, units, available);
  in_parallel(threads, units, [&](int, int64_t from, int64_t to) {
    const Planes p = shared;
    const int channels = static_cast<int>(p.channels);
    const Gathering gather(channels);
    for (int64_t unit = from; unit < to; ++unit) {
      const int64_t image = unit / blocks, first = unit % blocks * 16, left = p.pixels - first;
      const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
      __m512i pixels = _mm512_setzero_si512();
      for (int c = 0; c < channels; ++c) {
        const __m512i steps = steps_of(p, p.x + (image * channels + c) * p.pixels + first, mask);
        pixels = _mm512_or_si512(pixels, _mm512_sllv_epi32(steps, _mm512_set1_epi32(8 * c)));
      }
      const int64_t bytes = (left >= 16 ? 16 : left) * channels;
      const __mmask64 kept = bytes == 64 ? ~0ull : (1ull << bytes) - 1;
      _mm512_mask_storeu_epi8(out + (image * p.pixels + first) * channels, kept, gather(pixels));
    }
  });
}

}  // namespace qompose_x86
