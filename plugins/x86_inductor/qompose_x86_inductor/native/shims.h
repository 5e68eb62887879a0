// SPDX-License-Identifier: Apache-2.0
// The operators qompose_x86::vnni_product and vnni_depthwise for compiled programs, which include this file.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

#pragma GCC push_options
#pragma GCC optimize("O3")  // torch compiles the file that includes this one with -O1
#include "arguments.h"
#pragma GCC pop_options

namespace qompose_x86 {

inline void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("torch refuses a tensor");
}

template <typename T>
T* data_of(AtenTensorHandle tensor) {
  void* data = nullptr;
  check(aoti_torch_get_data_ptr(tensor, &data));
  return static_cast<T*>(data);
}

inline Kind kind_of(AtenTensorHandle tensor) {
  int32_t dtype = 0;
  check(aoti_torch_get_dtype(tensor, &dtype));
  return dtype == aoti_torch_dtype_uint8() ? UINT8 : dtype == aoti_torch_dtype_int8() ? INT8 : FLOAT32;
}

inline int32_t dtype_of(Kind kind) {
  return kind == UINT8  ? aoti_torch_dtype_uint8()
         : kind == INT8 ? aoti_torch_dtype_int8()
                        : aoti_torch_dtype_float32();
}

// Sizes of a tensor of four axes without gaps, as compilers are told to give it.
inline const int64_t* sizes_of(AtenTensorHandle tensor) {
  int64_t *sizes = nullptr, *strides = nullptr, step = 1;
  check(aoti_torch_get_sizes(tensor, &sizes));
  check(aoti_torch_get_strides(tensor, &strides));
  for (int axis = 3; axis >= 0; step *= sizes[axis--])
    if (sizes[axis] > 1 && strides[axis] != step) throw std::runtime_error("a tensor is not contiguous");
  return sizes;
}

inline AOTITorchError call(bool by_channel, AtenTensorHandle x, const Constants& constants,
                           AtenTensorHandle* other, const int64_t* s, const double* e,
                           AtenTensorHandle* result) {
  try {
    const Image image = image_of(data_of<uint8_t>(x), sizes_of(x), s);
    const int64_t channels = s[OUT_CHANNELS];
    const int64_t sizes[] = {image.n, image.oh, image.ow, channels};
    const int64_t strides[] = {image.oh * image.ow * channels, image.ow * channels, channels, 1};
    const int32_t dtype = dtype_of(static_cast<Kind>(s[KIND]));
    if (other) sizes_of(*other);
    check(aoti_torch_empty_strided(4, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, result));
    run(by_channel, image, constants, other ? data_of<void>(*other) : nullptr,
        other ? kind_of(*other) : FLOAT32, s, e, data_of<void>(*result));
    return AOTI_TORCH_SUCCESS;
  } catch (...) {  // no exception may leave a function of C
    return AOTI_TORCH_FAILURE;
  }
}

inline AOTITorchError call_planes(AtenTensorHandle x, double scale, int zp, int low, int high,
                                  AtenTensorHandle* result) {
  try {
    const int64_t* from = sizes_of(x);
    const int64_t channels = from[1], height = from[2], width = from[3];
    const int64_t sizes[] = {from[0], height, width, channels};
    const int64_t strides[] = {height * width * channels, width * channels, channels, 1};
    check(aoti_torch_empty_strided(4, sizes, strides, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(),
                                   0, result));
    const float inverse = static_cast<float>(1.0 / scale);
    quantize_planes({data_of<float>(x), from[0], channels, height * width, inverse, zp, low, high},
                    data_of<uint8_t>(*result));
    return AOTI_TORCH_SUCCESS;
  } catch (...) {
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace qompose_x86

#define QOMPOSE_SHIM(NAME, BY_CHANNEL)                                                                       \
  extern "C" inline AOTITorchError NAME(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle start, \
                                        AtenTensorHandle scale, AtenTensorHandle bias,                       \
                                        AtenTensorHandle* other, const int64_t* sizes, int64_t,              \
                                        const double* ends, int64_t, AtenTensorHandle* result) {             \
    using namespace qompose_x86;                                                                             \
    const Constants constants = {data_of<int8_t>(weight), data_of<int32_t>(start), data_of<float>(scale),    \
                                 data_of<float>(bias)};                                                      \
    return call(BY_CHANNEL, x, constants, other, sizes, ends, result);                                       \
  }

QOMPOSE_SHIM(aoti_torch_cpu_vnni_product, false)
QOMPOSE_SHIM(aoti_torch_cpu_vnni_depthwise, true)

extern "C" inline AOTITorchError aoti_torch_cpu_quantize_planes(AtenTensorHandle x, double scale, int64_t zp,
                                                                int64_t low, int64_t high,
                                                                AtenTensorHandle* result) {
  return qompose_x86::call_planes(x, scale, static_cast<int>(zp), static_cast<int>(low),
                                  static_cast<int>(high), result);
}
