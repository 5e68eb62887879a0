// SPDX-License-Identifier: Apache-2.0
// The operators qompose_x86::native_* and quantize_planes for compiled programs, which include this file.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

// torch compiles the file that includes this one with -O1. What is included above stays as it is: without
// strict aliasing, and GCC takes that from a function of ours too as soon as std::min is inlined in it. If
// ours had it, their options would then differ, and GCC would inline no more of them in each other.
#pragma GCC push_options
#pragma GCC optimize("O3,no-strict-aliasing")
#include "arguments.h"
#ifndef QOMPOSE_PRODUCTS_ALONE
#include "cache_attention.h"
#include "recurrent.h"
#ifdef QOMPOSE_AVX512_VNNI
#include "attention.h"
#endif
#endif
#pragma GCC pop_options
#include "tensors.h"

namespace qompose_x86 {

inline int32_t dtype_of(Kind kind) {
  return kind == UINT8  ? aoti_torch_dtype_uint8()
         : kind == INT8 ? aoti_torch_dtype_int8()
                        : aoti_torch_dtype_float32();
}

inline Kind kind_of(AtenTensorHandle tensor) {
  const int32_t dtype = dtype_of(tensor);
  for (const Kind kind : {UINT8, INT8, FLOAT32})
    if (dtype == dtype_of(kind)) return kind;
  throw std::invalid_argument("a tensor must be uint8, int8 or float32");
}

// Sizes of a tensor of four axes without gaps, as compilers are told to give it.
inline const int64_t* sizes_of(AtenTensorHandle tensor) {
  int64_t *sizes = nullptr, *strides = nullptr, axes = 0, step = 1;
  check(aoti_torch_get_dim(tensor, &axes));
  require(axes == 4, "a tensor must have four dimensions");
  check(aoti_torch_get_sizes(tensor, &sizes));
  check(aoti_torch_get_strides(tensor, &strides));
  for (int axis = 3; axis >= 0; step *= std::max<int64_t>(1, sizes[axis--]))
    require(sizes[axis] <= 1 || strides[axis] == step, "a tensor must be contiguous");
  return sizes;
}

// A tensor of at most four axes that is deleted unless it is given away.
class Result {
 public:
  Result(const int64_t* sizes, Kind kind, int axes = 4) {
    int64_t strides[4] = {1, 1, 1, 1};
    for (int axis = axes - 2; axis >= 0; --axis) strides[axis] = strides[axis + 1] * sizes[axis + 1];
    check(aoti_torch_empty_strided(axes, sizes, strides, dtype_of(kind), aoti_torch_device_type_cpu(), 0,
                                   &tensor_));
  }
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;
  ~Result() {
    if (tensor_) aoti_torch_delete_tensor_object(tensor_);
  }
  AtenTensorHandle tensor() const { return tensor_; }
  AtenTensorHandle give() {
    const AtenTensorHandle given = tensor_;
    tensor_ = nullptr;
    return given;
  }

 private:
  AtenTensorHandle tensor_ = nullptr;
};

inline AtenTensorHandle call(bool by_channel, AtenTensorHandle x, AtenTensorHandle weight,
                             AtenTensorHandle start, AtenTensorHandle scale, AtenTensorHandle bias,
                             AtenTensorHandle* per_step, AtenTensorHandle* other, const int64_t* s,
                             int64_t size_count, const double* e, int64_t end_count) {
  require(size_count == SIZES && end_count == ENDS, "the lists of numbers have the wrong length");
  require(s[VECTOR_LANES] == LANES, "the weight is packed for another vector width");
  require(kind_of(x) == UINT8, "x must be uint8");
  const Image image = image_of(data_of<uint8_t>(x), sizes_of(x), s);
  const int64_t channels = s[OUT_CHANNELS], unit = by_channel ? CHANNELS : LANES,
                whole = (channels + unit - 1) / unit * unit;
  const int64_t sizes[] = {image.n, image.oh, image.ow, channels};
  require(!by_channel || image.c == channels, "x and the weight have different channels");
  if (other) require(std::equal(sizes, sizes + 4, sizes_of(*other)), "the added tensor has the wrong shape");
  require(s[FUNCTION] == NONE || per_step, "a function has no factors");
  const Constants constants = {
      values_of<int8_t>(weight, aoti_torch_dtype_int8(), packed_bytes(by_channel, image, channels)),
      values_of<int32_t>(start, aoti_torch_dtype_int32(), whole),
      values_of<float>(scale, aoti_torch_dtype_float32(), whole),
      values_of<float>(bias, aoti_torch_dtype_float32(), whole),
      per_step ? values_of<float>(*per_step, aoti_torch_dtype_float32(), whole) : nullptr};
  Result result(sizes, static_cast<Kind>(s[KIND]));
  run(available_threads(), by_channel, image, constants, other ? data_of<void>(*other) : nullptr,
      other ? kind_of(*other) : FLOAT32, s, e, data_of<void>(result.tensor()));
  return result.give();
}

inline AtenTensorHandle call_planes(AtenTensorHandle x, double scale, int64_t zp, int64_t low, int64_t high) {
  require(kind_of(x) == FLOAT32, "x must be float32");
  const int64_t* from = sizes_of(x);
  const int64_t channels = from[1], pixels = from[2] * from[3];
  const int64_t sizes[] = {from[0], from[2], from[3], channels};
  require(0 < channels && channels <= MOST_PLANES, "x has too many channels");
  Result result(sizes, UINT8);
  const float inverse = static_cast<float>(1.0 / scale);
  const Planes planes = {
      data_of<float>(x),     from[0], channels, pixels, inverse, static_cast<int>(zp), static_cast<int>(low),
      static_cast<int>(high)};
  quantize_planes(planes, data_of<uint8_t>(result.tensor()), available_threads());
  return result.give();
}

}  // namespace qompose_x86

#define QOMPOSE_SHIM(NAME, BY_CHANNEL)                                                                  \
  extern "C" inline AOTITorchError aoti_torch_cpu_##NAME(                                               \
      AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle start, AtenTensorHandle scale,      \
      AtenTensorHandle bias, AtenTensorHandle* per_step, AtenTensorHandle* other, const int64_t* sizes, \
      int64_t size_count, const double* ends, int64_t end_count, AtenTensorHandle* result) {            \
    return qompose_x86::without_exceptions(#NAME, [&] {                                                 \
      *result = qompose_x86::call(BY_CHANNEL, x, weight, start, scale, bias, per_step, other, sizes,    \
                                  size_count, ends, end_count);                                         \
    });                                                                                                 \
  }

QOMPOSE_SHIM(native_product, false)
QOMPOSE_SHIM(native_depthwise, true)

extern "C" inline AOTITorchError aoti_torch_cpu_quantize_planes(AtenTensorHandle x, double scale, int64_t zp,
                                                                int64_t low, int64_t high,
                                                                AtenTensorHandle* result) {
  return qompose_x86::without_exceptions(
      "quantize_planes", [&] { *result = qompose_x86::call_planes(x, scale, zp, low, high); });
}

#ifndef QOMPOSE_PRODUCTS_ALONE
#include "attention_shim.h"
#include "recurrent_shim.h"
#endif
