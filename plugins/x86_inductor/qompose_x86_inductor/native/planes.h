// SPDX-License-Identifier: Apache-2.0
// Quantization of float images of two to four channels, which lie plane by plane, to unsigned bytes by pixel.
#pragma once

#include "lanes.h"
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

// Each lane holds the channels of a pixel: take their bytes together, LANES pixels at a time.
class Gathering {
 public:
  explicit Gathering(int channels) {
    alignas(64) int8_t within[4 * LANES];
    alignas(64) int32_t across[LANES];
    for (int i = 0; i < 4 * LANES; ++i) {
      const int to = i % 16;
      within[i] = to < 4 * channels ? static_cast<int8_t>(to / channels * 4 + to % channels) : -1;
    }
    // `channels` lanes of each four are full.
    for (int i = 0; i < LANES; ++i)
      across[i] = i < LANES / 4 * channels ? i / channels * 4 + i % channels : 0;
    bytes_ = load_ints(within);
    lanes_ = load_ints(across);
  }
  Ints operator()(Ints pixels) const { return permuted(shuffled(pixels, bytes_), lanes_); }

 private:
  Ints bytes_, lanes_;
};

inline Ints steps_of(const Planes& p, const float* x, First some) {
  const Floats low = floats(static_cast<float>(p.low - p.zp)),
               high = floats(static_cast<float>(p.high - p.zp));
  const Floats value = mul(load(some, x), floats(p.inverse_scale));
  const Floats kept = min(high, max(value, low));  // NaN, the first operand, gives `low`
  return add(to_ints(kept), ints(p.zp));
}

inline void quantize_planes(const Planes& shared, uint8_t* out, int available) {
  const int64_t blocks = (shared.pixels + LANES - 1) / LANES, units = shared.images * blocks;
  const int64_t values = units * LANES * shared.channels;
  const int threads = threads_for(values * PRODUCTS_PER_VALUE, units, available);
  in_parallel(threads, units, [&](int, int64_t from, int64_t to) {
    const Planes p = shared;
    const int channels = static_cast<int>(p.channels);
    const Gathering gather(channels);
    for (int64_t unit = from; unit < to; ++unit) {
      const int64_t image = unit / blocks, begin = unit % blocks * LANES, left = p.pixels - begin;
      Ints pixels = ints(0);
      for (int c = 0; c < channels; ++c) {
        const float* plane = p.x + (image * channels + c) * p.pixels;
        pixels = either(pixels, shifted_left(steps_of(p, plane + begin, first_lanes(left)), 8 * c));
      }
      const int64_t bytes = (left >= LANES ? LANES : left) * channels;
      store_bytes(first_bytes(bytes), out + (image * p.pixels + begin) * channels, gather(pixels));
    }
  });
}

}  // namespace qompose_x86
