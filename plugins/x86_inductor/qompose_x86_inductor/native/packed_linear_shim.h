// SPDX-License-Identifier: Apache-2.0
// The operator qompose_x86::linear_packed for compiled programs, which include this file, on any processor.
#pragma once

#include <omp.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

// As in shims.h, which says why.
#pragma GCC push_options
#pragma GCC optimize("O3,no-strict-aliasing")
#include "packed_linear.h"
#pragma GCC pop_options
#include "tensors.h"

namespace qompose_x86 {
namespace packed {

enum Size { CHANNELS, DEPTH, GROUP, BITS, MODE, INPUTS, SIZES };

template <typename T>
const T* values_if(AtenTensorHandle* tensor, int32_t dtype, int64_t count) {
  return tensor ? values_of<T>(*tensor, dtype, count) : nullptr;
}

inline AtenTensorHandle call(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scales,
                             AtenTensorHandle* zero_points, AtenTensorHandle* columns, AtenTensorHandle* bias,
                             const int64_t* s, int64_t size_count) {
  require(size_count == SIZES, "the list of numbers has the wrong length");
  require(dtype_of(x) == aoti_torch_dtype_float32(), "x must be float32");
  int64_t *sizes = nullptr, axes = 0, rows = 1, step = 1;
  check(aoti_torch_get_dim(x, &axes));
  check(aoti_torch_get_sizes(x, &sizes));
  const int64_t given = sizes[axes - 1];
  require(given == s[INPUTS], "x and the weight have different channels");
  std::vector<int64_t> shape(sizes, sizes + axes), strides(axes);
  shape.back() = s[CHANNELS];
  for (int64_t axis = axes - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= shape[axis];
    if (axis + 1 < axes) rows *= sizes[axis];
  }
  const int64_t panels = (s[CHANNELS] + LANES - 1) / LANES;
  const int64_t scale_count = panels * LANES * (s[GROUP] ? s[DEPTH] / s[GROUP] : 0);
  const bool half = dtype_of(scales) == aoti_torch_dtype_bfloat16();
  AtenTensorHandle result = nullptr;
  check(aoti_torch_empty_strided(axes, shape.data(), strides.data(), aoti_torch_dtype_float32(),
                                 aoti_torch_device_type_cpu(), 0, &result));
  const int32_t float32 = aoti_torch_dtype_float32();
  const Linear linear = {
      rows,
      s[DEPTH],
      s[CHANNELS],
      s[GROUP],
      static_cast<int>(s[BITS]),
      static_cast<RowMode>(s[MODE]),
      values_of<uint8_t>(weight, aoti_torch_dtype_uint8(), panels * LANES * s[DEPTH] * s[BITS] / 8),
      values_of<void>(scales, half ? aoti_torch_dtype_bfloat16() : float32, scale_count),
      half,
      values_if<int8_t>(zero_points, aoti_torch_dtype_int8(), scale_count),
      values_if<float>(columns, float32, s[CHANNELS]),
      values_if<float>(bias, float32, s[CHANNELS]),
      data_of<float>(result)};
  try {
    compute(linear, data_of<float>(x), given, available_threads());
  } catch (...) {
    aoti_torch_delete_tensor_object(result);
    throw;
  }
  return result;
}

}  // namespace packed
}  // namespace qompose_x86

extern "C" inline AOTITorchError aoti_torch_cpu_linear_packed(AtenTensorHandle x, AtenTensorHandle weight,
                                                              AtenTensorHandle scales,
                                                              AtenTensorHandle* zero_points,
                                                              AtenTensorHandle* columns,
                                                              AtenTensorHandle* bias, const int64_t* sizes,
                                                              int64_t size_count, AtenTensorHandle* result) {
  return qompose_x86::without_exceptions("linear_packed", [&] {
    *result = qompose_x86::packed::call(x, weight, scales, zero_points, columns, bias, sizes, size_count);
  });
}
