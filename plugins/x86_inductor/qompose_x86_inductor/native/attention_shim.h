// SPDX-License-Identifier: Apache-2.0
// The operators qompose_x86::native_attention and native_float_attention for compiled programs: their
// arguments, as attention.py and float_attention.py give them.
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

// Sizes of queries, keys and values, which are of one type.
inline Heads heads_of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, int32_t dtype) {
  for (const AtenTensorHandle tensor : {query, key, value})
    require(dtype_of(tensor) == dtype, "queries, keys or values have the wrong dtype");
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
                                             double scale) {
  FloatAttention a = {heads_of(query, key, value, aoti_torch_dtype_float32())};
  a.q = strided<float>(query);
  a.k = strided<float>(key);
  a.v = strided<float>(value);
  a.causal = causal;
  a.scale = static_cast<float>(scale);
  return attended(a, mask, FLOAT32);
}

#ifdef QOMPOSE_AVX512_VNNI
inline AtenTensorHandle call_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                       AtenTensorHandle* mask, const int64_t* s, const double* e) {
  Attention a = {heads_of(query, key, value, aoti_torch_dtype_uint8())};
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
    int32_t causal, double scale, AtenTensorHandle* result) {
  return qompose_x86::without_exceptions("native_float_attention", [&] {
    *result = qompose_x86::call_float_attention(query, key, value, mask, causal != 0, scale);
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
