// SPDX-License-Identifier: Apache-2.0
// The operator qompose_x86::native_attention for compiled programs: its arguments, as attention.py gives
// them.
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
  require(axes <= 4, "a tensor has more than four axes");
  Strided<T> result = {data_of<T>(tensor), {}};
  for (int64_t axis = 0; axis < axes; ++axis)
    result.strides[4 - axes + axis] = sizes[axis] == 1 ? 0 : strides[axis];
  return result;
}

inline const int64_t* four_sizes(AtenTensorHandle tensor) {
  int64_t *sizes = nullptr, axes = 0;
  check(aoti_torch_get_dim(tensor, &axes));
  require(axes == 4, "a tensor has not four axes");
  check(aoti_torch_get_sizes(tensor, &sizes));
  return sizes;
}

// A mask of at most the sizes of the scores, or 1, which repeats.
inline void set_mask(Attention& a, AtenTensorHandle mask) {
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
    require(sizes[axis] == 1 || sizes[axis] == scores[4 - axes + axis], "a mask has another shape");
}

inline Attention attention_of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                              const int64_t* s, const double* e) {
  for (const AtenTensorHandle tensor : {query, key, value})
    require(dtype_of(tensor) == aoti_torch_dtype_uint8(), "queries, keys or values are not uint8");
  const int64_t *q = four_sizes(query), *k = four_sizes(key), *v = four_sizes(value);
  require(k[0] == q[0] && v[0] == q[0] && k[3] == q[3] && std::equal(k + 1, k + 3, v + 1),
          "queries, keys and values do not fit each other");
  require(k[1] == 0 ? q[1] == 0 : q[1] % k[1] == 0, "heads of queries are no multiple of those of keys");
  require(k[2] <= MOST_KEYS, "there are more than 65536 keys");
  Attention a = {q[0], q[1], k[1], q[2], k[2], q[3], v[3]};
  a.q = strided<uint8_t>(query);
  a.k = strided<uint8_t>(key);
  a.v = strided<uint8_t>(value);
  return described(a, s, e);
}

inline AtenTensorHandle call_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                       AtenTensorHandle* mask, const int64_t* s, const double* e) {
  Attention a = attention_of(query, key, value, s, e);
  if (mask) set_mask(a, *mask);
  const int64_t sizes[] = {a.batches, a.queries, a.heads, a.value_width};
  Result result(sizes, a.kind);
  attend(a, data_of<void>(result.tensor()), available_threads());
  return result.give();
}

}  // namespace qompose_x86

extern "C" inline AOTITorchError aoti_torch_cpu_native_attention(AtenTensorHandle query, AtenTensorHandle key,
                                                                 AtenTensorHandle value,
                                                                 AtenTensorHandle* mask, const int64_t* sizes,
                                                                 int64_t, const double* ends, int64_t,
                                                                 AtenTensorHandle* result) {
  return qompose_x86::without_exceptions("native_attention", [&] {
    *result = qompose_x86::call_attention(query, key, value, mask, sizes, ends);
  });
}
