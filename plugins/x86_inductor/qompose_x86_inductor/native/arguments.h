// SPDX-License-Identifier: Apache-2.0
// The lists of numbers that an operator reads, in the order in which vnni.py gives them.
#pragma once

#include "depthwise.h"
#include "planes.h"
#include "products.h"

namespace qompose_x86 {

enum Size : int { OUT_CHANNELS, KH, KW, SH, SW, PH, PW, DH, DW, X_ZP, FUNCTION, ZP, KIND };
enum End : int { OTHER_SCALE, OTHER_ZP, SLOPE, PER_STEP, LOW, HIGH };

struct Constants {
  const int8_t* weight;
  const int32_t* start;
  const float* scale;
  const float* bias;
};

// `dims`: of x, (N, H, W, C).
inline Image image_of(Bytes x, const int64_t* dims, const int64_t* s) {
  const int64_t height = dims[1] + 2 * s[PH] - s[DH] * (s[KH] - 1) - 1;
  const int64_t width = dims[2] + 2 * s[PW] - s[DW] * (s[KW] - 1) - 1;
  return {x,
          dims[0],
          dims[1],
          dims[2],
          dims[3],
          height / s[SH] + 1,
          width / s[SW] + 1,
          s[KH],
          s[KW],
          s[SH],
          s[SW],
          s[PH],
          s[PW],
          s[DH],
          s[DW],
          static_cast<int>(s[X_ZP])};
}

inline void run(bool by_channel, const Image& image, const Constants& c, const void* other, Kind other_kind,
                const int64_t* s, const double* e, void* out) {
  const auto end = [e](End which) { return static_cast<float>(e[which]); };
  const Finish finish = {c.start,
                         c.scale,
                         c.bias,
                         other,
                         other_kind,
                         end(OTHER_SCALE),
                         end(OTHER_ZP),
                         static_cast<Function>(s[FUNCTION]),
                         end(SLOPE),
                         end(PER_STEP),
                         end(LOW),
                         end(HIGH),
                         static_cast<int>(s[ZP]),
                         static_cast<Kind>(s[KIND]),
                         s[OUT_CHANNELS]};
  if (image.pixels() == 0 || finish.channels == 0) return;
  if (by_channel)
    depthwise(image, c.weight, finish, out);
  else
    product(image, c.weight, finish, out);
}

}  // namespace qompose_x86
