// SPDX-License-Identifier: Apache-2.0
// The kernels of native/ behind one function of C, so that a test can call them without compiling a model.
#include "arguments.h"

extern "C" void run(bool by_channel, const uint8_t* x, const int64_t* dims, const int8_t* weight,
                    const int32_t* start, const float* scale, const float* bias, const void* other,
                    int other_kind, const int64_t* sizes, const double* ends, void* out) {
  using namespace qompose_x86;
  run(by_channel, image_of(x, dims, sizes), {weight, start, scale, bias}, other,
      static_cast<Kind>(other_kind), sizes, ends, out);
}

extern "C" void quantize(const float* x, int64_t images, int64_t channels, int64_t pixels, float inverse,
                         int zp, int low, int high, uint8_t* out) {
  qompose_x86::quantize_planes({x, images, channels, pixels, inverse, zp, low, high}, out);
}
