// SPDX-License-Identifier: Apache-2.0
// The operators qompose_x86::native_attention, native_float_attention and native_cache_attention for compiled
// programs: their arguments, as attention.py, float_attention.py and cache_attention.py give them.
#pragma once

namespace qompose_x86 {

// A tensor of at most four axes, which counts as one of four: strides of axes that it lacks, or repeats, are
// 0.
template <typename T>
Strided<T> strided(AtenTensorHandle tensor) {
  int64_t *sizes = nullptr, *strides = nullptr, axes = 0;
  check(aoti_torch_get_dim(tensor, &axes));
  check(aoti_torch_get_sizes(tensor, &sizes));
  check(aoti_torch_get_strides(tensor, &strides));
  require(axes <= 4, "a tensor must have at most four dimensions");
  Strided<T> result = {data_of<T>(tensor), {}};
  for (int64_t axis = 0; axis < axes; ++axis)
    result.strides[4 - axes + axis] = sizes[axis] == 1 ? 0 : strides[axis];
  return result;
}

inline const int64_t* four_sizes(AtenTensorHandle tensor) {
  int64_t *sizes = nullptr, axes = 0;
  check(aoti_torch_get_dim(tensor, &axes));
  require(axes == 4, "a tensor must have four dimensions");
  check(aoti_torch_get_sizes(tensor, &sizes));
  return sizes;
}

// A mask of at most the sizes of the scores, or 1, which repeats.
inline void set_mask(Heads& a, AtenTensorHandle mask) {
  const int32_t dtype = dtype_of(mask);
  require(dtype == aoti_torch_dtype_bool() || dtype == aoti_torch_dtype_float32(),
          "a mask is neither of booleans nor of float32");
  a.mask_kind = dtype == aoti_torch_dtype_bool() ? KEEP : ADDED;
  a.mask = strided<uint8_t>(mask);
  const int64_t scores[] = {a.batches, a.heads, a.queries, a.keys};
  int64_t *sizes = nullptr, axes = 0;
  check(aoti_torch_get_dim(mask, &axes));
  check(aoti_torch_get_sizes(mask, &sizes));
  for (int64_t axis = 0; axis < axes; ++axis)
    require(sizes[axis] == 1 || sizes[axis] == scores[4 - axes + axis], "the mask has the wrong shape");
}

// Sizes of queries of one type and of keys and values of one.
inline Heads heads_of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, int32_t dtype,
                      int32_t of_keys) {
  const bool fit = dtype_of(query) == dtype && dtype_of(key) == of_keys && dtype_of(value) == of_keys;
  require(fit, "queries, keys or values have the wrong dtype");
  const int64_t *q = four_sizes(query), *k = four_sizes(key), *v = four_sizes(value);
  require(k[0] == q[0] && v[0] == q[0] && k[3] == q[3] && std::equal(k + 1, k + 3, v + 1),
          "queries, keys and values do not fit each other");
  require(k[1] == 0 ? q[1] == 0 : q[1] % k[1] == 0, "query heads must be a multiple of key heads");
  return {q[0], q[1], k[1], q[2], k[2], q[3], v[3]};
}

// `a` with its mask, run.
template <typename Description>
AtenTensorHandle attended(Description a, AtenTensorHandle* mask, Kind kind) {
  if (mask) set_mask(a, *mask);
  const int64_t sizes[] = {a.batches, a.queries, a.heads, a.value_width};
  Result result(sizes, kind);
  attend(a, data_of<void>(result.tensor()), available_threads());
  return result.give();
}

inline AtenTensorHandle call_float_attention(AtenTensorHandle query, AtenTensorHandle key,
                                             AtenTensorHandle value, AtenTensorHandle* mask, bool causal,
                                             double scale, double hidden, bool safe_softmax) {
  FloatAttention a = {heads_of(query, key, value, aoti_torch_dtype_float32(), aoti_torch_dtype_float32())};
  a.q = strided<float>(query);
  a.k = strided<float>(key);
  a.v = strided<float>(value);
  a.causal = causal;
  a.scale = static_cast<float>(scale);
  a.hidden = static_cast<float>(hidden);
  a.safe_softmax = safe_softmax;
  return attended(a, mask, FLOAT32);
}

// Scales of the rows of keys or values.
inline Strided<float> scales_of(AtenTensorHandle scales, AtenTensorHandle rows) {
  require(dtype_of(scales) == aoti_torch_dtype_float32(), "scales must be float32");
  const int64_t *s = four_sizes(scales), *r = four_sizes(rows);
  require(std::equal(s, s + 3, r) && s[3] == 1, "there must be a scale for each row");
  return strided<float>(scales);
}

// `tensors`: keys, their scales, values, their scales.
inline AtenTensorHandle call_cache_attention(AtenTensorHandle query, const AtenTensorHandle* tensors,
                                             AtenTensorHandle* mask, bool causal, double scale) {
  CacheAttention a = {
      heads_of(query, tensors[0], tensors[2], aoti_torch_dtype_float32(), aoti_torch_dtype_int8())};
  a.q = strided<float>(query);
  a.k = strided<int8_t>(tensors[0]);
  a.v = strided<int8_t>(tensors[2]);
  require(a.width <= 1 || a.k.strides[3] == 1, "columns of keys must lie side by side");
  require(a.value_width <= 1 || a.v.strides[3] == 1, "columns of values must lie side by side");
  a.k_scales = scales_of(tensors[1], tensors[0]);
  a.v_scales = scales_of(tensors[3], tensors[2]);
  a.causal = causal;
  a.scale = static_cast<float>(scale);
  return attended(a, mask, FLOAT32);
}

#ifdef QOMPOSE_AVX512_VNNI
inline AtenTensorHandle call_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                       AtenTensorHandle* mask, const int64_t* s, const double* e) {
  Attention a = {heads_of(query, key, value, aoti_torch_dtype_uint8(), aoti_torch_dtype_uint8())};
  require(a.keys <= MOST_KEYS, "at most 65536 keys are supported");
  a.q = strided<uint8_t>(query);
  a.k = strided<uint8_t>(key);
  a.v = strided<uint8_t>(value);
  a = described(a, s, e);
  return attended(a, mask, a.kind);
}
#endif

}  // namespace qompose_x86

extern "C" inline AOTITorchError aoti_torch_cpu_native_float_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle* mask,
    int32_t causal, double scale, double hidden, int32_t safe_softmax, AtenTensorHandle* result) {
  return qompose_x86::without_exceptions("native_float_attention", [&] {
    *result = qompose_x86::call_float_attention(query, key, value, mask, causal != 0, scale, hidden,
                                                safe_softmax != 0);
  });
}

extern "C" inline AOTITorchError aoti_torch_cpu_native_cache_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle key_scales, AtenTensorHandle value,
    AtenTensorHandle value_scales, AtenTensorHandle* mask, int32_t causal, double scale,
    AtenTensorHandle* result) {
  return qompose_x86::without_exceptions("native_cache_attention", [&] {
    const AtenTensorHandle tensors[] = {key, key_scales, value, value_scales};
    *result = qompose_x86::call_cache_attention(query, tensors, mask, causal != 0, scale);
  });
}

#ifdef QOMPOSE_AVX512_VNNI
extern "C" inline AOTITorchError aoti_torch_cpu_native_attention(AtenTensorHandle query, AtenTensorHandle key,
                                                                 AtenTensorHandle value,
                                                                 AtenTensorHandle* mask, const int64_t* sizes,
                                                                 int64_t, const double* ends, int64_t,
                                                                 AtenTensorHandle* result) {
  return qompose_x86::without_exceptions("native_attention", [&] {
    *result = qompose_x86::call_attention(query, key, value, mask, sizes, ends);
  });
}
#endif
