// SPDX-License-Identifier: Apache-2.0
// The operators qompose_x86::linear_packed and linears_packed for compiled programs, which include this file,
// on any processor.
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

enum Constant { WEIGHT, SCALES, ZERO_POINTS, COLUMNS, BIAS, CONSTANTS };

template <typename T>
const T* values_if(const AtenTensorHandle* tensor, int32_t dtype, int64_t count) {
  return tensor ? values_of<T>(*tensor, dtype, count) : nullptr;
}

// One linear of `rows` rows, whose numbers are `s`; `out` has no values yet.
inline Linear described(const AtenTensorHandle* const* constants, const int64_t* s, int64_t rows, float* out,
                        int64_t line) {
  const int64_t panels = (s[CHANNELS] + LANES - 1) / LANES;
  const int64_t scale_count = panels * LANES * (s[GROUP] ? s[DEPTH] / s[GROUP] : 0);
  require(constants[WEIGHT] && constants[SCALES], "a linear lacks its weight or scales");
  const AtenTensorHandle scales = *constants[SCALES];
  const bool half = dtype_of(scales) == aoti_torch_dtype_bfloat16();
  const int32_t float32 = aoti_torch_dtype_float32();
  return {rows,
          s[DEPTH],
          s[CHANNELS],
          s[GROUP],
          static_cast<int>(s[BITS]),
          static_cast<RowMode>(s[MODE]),
          values_of<uint8_t>(*constants[WEIGHT], aoti_torch_dtype_uint8(),
                             panels * LANES * s[DEPTH] * s[BITS] / 8),
          values_of<void>(scales, half ? aoti_torch_dtype_bfloat16() : float32, scale_count),
          half,
          values_if<int8_t>(constants[ZERO_POINTS], aoti_torch_dtype_int8(), scale_count),
          values_if<float>(constants[COLUMNS], float32, s[CHANNELS]),
          values_if<float>(constants[BIAS], float32, s[CHANNELS]),
          out,
          line};
}

// All numbers but the channels are the same for linears of one call.
inline void require_alike(const int64_t* sizes, int64_t count) {
  for (int64_t i = 1; i < count; ++i)
    require(std::equal(sizes + 1, sizes + SIZES, sizes + i * SIZES + 1), "the linears read different rows");
}

// Linears of x, whose results lie side by side.
inline AtenTensorHandle call(AtenTensorHandle x, const AtenTensorHandle* const* constants, int64_t count,
                             const int64_t* s) {
  require(dtype_of(x) == aoti_torch_dtype_float32(), "x must be float32");
  require_alike(s, count);
  int64_t *sizes = nullptr, axes = 0, rows = 1, step = 1, line = 0;
  check(aoti_torch_get_dim(x, &axes));
  check(aoti_torch_get_sizes(x, &sizes));
  const int64_t given = sizes[axes - 1];
  require(given == s[INPUTS], "x and the weight have different channels");
  for (int64_t i = 0; i < count; ++i) line += s[i * SIZES + CHANNELS];
  std::vector<int64_t> shape(sizes, sizes + axes), strides(axes);
  shape.back() = line;
  for (int64_t axis = axes - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= shape[axis];
    if (axis + 1 < axes) rows *= sizes[axis];
  }
  AtenTensorHandle result = nullptr;
  check(aoti_torch_empty_strided(axes, shape.data(), strides.data(), aoti_torch_dtype_float32(),
                                 aoti_torch_device_type_cpu(), 0, &result));
  try {
    float* out = data_of<float>(result);
    Linears linears;
    for (int64_t i = 0; i < count; ++i, s += SIZES) {
      linears.push_back(described(constants + i * CONSTANTS, s, rows, out, line));
      out += s[CHANNELS];
    }
    compute(linears, data_of<float>(x), given, available_threads());
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
  using namespace qompose_x86;
  return without_exceptions("linear_packed", [&] {
    require(size_count == packed::SIZES, "the list of numbers has the wrong length");
    const AtenTensorHandle* constants[] = {&weight, &scales, zero_points, columns, bias};
    *result = packed::call(x, constants, 1, sizes);
  });
}

extern "C" inline AOTITorchError aoti_torch_cpu_linears_packed(AtenTensorHandle x,
                                                               const AtenTensorHandle** constants,
                                                               int64_t constant_count, const int64_t* sizes,
                                                               int64_t size_count, AtenTensorHandle* result) {
  using namespace qompose_x86;
  return without_exceptions("linears_packed", [&] {
    const int64_t count = size_count / packed::SIZES;
    require(count > 0 && size_count == count * packed::SIZES && constant_count == count * packed::CONSTANTS,
            "the lists have the wrong lengths");
    *result = packed::call(x, constants, count, sizes);
  });
}
