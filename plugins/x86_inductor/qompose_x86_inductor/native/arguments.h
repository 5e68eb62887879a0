// SPDX-License-Identifier: Apache-2.0
// The lists of numbers that an operator reads, in the order in which products.py gives them.
#pragma once

#include <stdexcept>

#include "depthwise.h"
#include "planes.h"
#include "products.h"

namespace qompose_x86 {

enum Size : int {
  OUT_CHANNELS,
  KH,
  KW,
  SH,
  SW,
  PH,
  PW,
  DH,
  DW,
  X_ZP,
  FUNCTION,
  ZP,
  KIND,
  VECTOR_LANES,
  GROUP_DEPTH,
  GROUP_CHANNELS,
  OWN_DEPTH,
  SIZES
};
enum End : int { OTHER_SCALE, OTHER_ZP, SLOPE, LOW, HIGH, ENDS };

struct Constants {
  const int8_t* weight;
  const int32_t* start;
  const float* scale;
  const float* bias;
  const float* per_step;  // null where there is no function
};

// Windows along one side of an image: none where it is empty. torch refuses a side smaller than a window.
inline int64_t windows_along(int64_t side, int64_t window, int64_t stride, int64_t padding, int64_t gap) {
  const int64_t room = side + 2 * padding - gap * (window - 1) - 1;
  if (room >= 0) return room / stride + 1;
  if (side > 0 || -room > stride) throw std::invalid_argument("the image is smaller than the kernel");
  return 0;
}

// `dims`: of x, (N, H, W, C).
inline Image image_of(Bytes x, const int64_t* dims, const int64_t* s) {
  return {x,
          dims[0],
          dims[1],
          dims[2],
          dims[3],
          windows_along(dims[1], s[KH], s[SH], s[PH], s[DH]),
          windows_along(dims[2], s[KW], s[SW], s[PW], s[DW]),
          s[KH],
          s[KW],
          s[SH],
          s[SW],
          s[PH],
          s[PW],
          s[DH],
          s[DW],
          static_cast<int>(s[X_ZP]),
          s[GROUP_DEPTH],
          s[OWN_DEPTH]};
}

// Of what products.pack makes for such an image.
inline int64_t packed_bytes(bool by_channel, const Image& g, int64_t channels) {
  if (by_channel) return (g.kh + 3) / 4 * 4 * g.kw * ((channels + CHANNELS - 1) / CHANNELS * CHANNELS);
  return g.runs() * g.quads() * 4 * ((channels + LANES - 1) / LANES * LANES);
}

// Results in several panels that a core's cache does not hold, whose sums take longer than the asking.
inline bool pays_to_fetch(const Image& g, int64_t channels, Kind kind) {
  const int64_t bytes = g.pixels() * channels * size_of(kind);
  return bytes > 512 << 10 && channels > PANEL && g.runs() * g.quads() >= 32;
}

// By at most so many threads.
inline void run(int threads, bool by_channel, const Image& image, const Constants& c, const void* other,
                Kind other_kind, const int64_t* s, const double* e, void* out) {
  const auto end = [e](End which) { return static_cast<float>(e[which]); };
  const auto kind = static_cast<Kind>(s[KIND]);
  const auto zp = static_cast<int>(s[ZP]);
  const Finish finish = {c.start,
                         c.scale,
                         c.bias,
                         c.per_step,
                         other,
                         other_kind,
                         end(OTHER_SCALE),
                         end(OTHER_ZP),
                         static_cast<Function>(s[FUNCTION]),
                         end(SLOPE),
                         end(LOW),
                         end(HIGH),
                         zp,
                         kind,
                         s[OUT_CHANNELS],
                         lowest_of(std::min(end(LOW), end(HIGH)), zp, kind),
                         pays_to_fetch(image, s[OUT_CHANNELS], kind)};
  if (image.pixels() == 0 || finish.channels == 0) return;
  if (by_channel)
    depthwise(image, c.weight, finish, out, threads);
  else
    product(image, c.weight, finish, s[GROUP_CHANNELS], out, threads);
}

}  // namespace qompose_x86
