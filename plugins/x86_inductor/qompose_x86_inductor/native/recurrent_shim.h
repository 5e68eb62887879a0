// SPDX-License-Identifier: Apache-2.0
// The operators qompose_x86::native_lstm and native_gru for compiled programs: their arguments, as
// recurrent.py gives them.
#pragma once

namespace qompose_x86 {

// Sizes of a float32 tensor of three axes without gaps.
inline const int64_t* three_sizes(AtenTensorHandle tensor) {
  int64_t *sizes = nullptr, *strides = nullptr, axes = 0, step = 1;
  check(aoti_torch_get_dim(tensor, &axes));
  require(axes == 3, "a tensor must have three dimensions");
  require(kind_of(tensor) == FLOAT32, "a tensor must be float32");
  check(aoti_torch_get_sizes(tensor, &sizes));
  check(aoti_torch_get_strides(tensor, &strides));
  for (int axis = 2; axis >= 0; step *= std::max<int64_t>(1, sizes[axis--]))
    require(sizes[axis] <= 1 || strides[axis] == step, "a tensor must be contiguous");
  return sizes;
}

inline const float* state_of(AtenTensorHandle tensor, const Recurrent& r, int64_t width) {
  const int64_t* sizes = three_sizes(tensor);
  require(sizes[0] == r.layers * r.directions && sizes[1] == r.batch && sizes[2] == width,
          "a first state has another shape");
  return data_of<float>(tensor);
}

inline void call_recurrent(AtenTensorHandle x, AtenTensorHandle hidden, AtenTensorHandle* cell,
                           AtenTensorHandle weights, AtenTensorHandle starts, AtenTensorHandle values,
                           const int64_t* s, int64_t count, AtenTensorHandle* results) {
  require(count == RECURRENT_SIZES, "the list of numbers has the wrong length");
  require(s[RECURRENT_LANES] == LANES, "the weights are packed for another vector width");
  require((s[GATES] == LSTM_GATES) == (cell != nullptr), "an LSTM requires a cell state, a GRU has none");
  const int64_t *given = three_sizes(x), by_batch = s[BATCH_FIRST];
  Recurrent r = recurrent_of(s, given[by_batch ? 1 : 0], given[by_batch ? 0 : 1]);
  require(given[2] == r.input_width, "x and the weights have different widths");
  const Totals totals = totals_of(r);
  r.x = data_of<float>(x);
  r.first_hidden = state_of(hidden, r, r.width());
  if (cell) r.first_cell = state_of(*cell, r, r.hidden);
  r.weights = values_of<int8_t>(weights, aoti_torch_dtype_int8(), totals.weights);
  r.starts = values_of<int32_t>(starts, aoti_torch_dtype_int32(), totals.starts);
  r.values = values_of<float>(values, aoti_torch_dtype_float32(), totals.values);
  const int64_t all = r.layers * r.directions;
  const int64_t output[] = {given[0], given[1], r.directions * r.width()};
  const int64_t hiddens[] = {all, r.batch, r.width()}, cells[] = {cell ? all : 0, r.batch, r.hidden};
  Result out(output, FLOAT32, 3), last(hiddens, FLOAT32, 3), last_cell(cells, FLOAT32, 3);
  r.out = data_of<float>(out.tensor());
  r.last_hidden = data_of<float>(last.tensor());
  if (cell) r.last_cell = data_of<float>(last_cell.tensor());
  recurrent(r, available_threads());
  results[0] = out.give();
  results[1] = last.give();
  if (cell) results[2] = last_cell.give();
}

}  // namespace qompose_x86

extern "C" inline AOTITorchError aoti_torch_cpu_native_lstm(
    AtenTensorHandle x, AtenTensorHandle hidden, AtenTensorHandle cell, AtenTensorHandle weights,
    AtenTensorHandle starts, AtenTensorHandle values, const int64_t* sizes, int64_t count,
    AtenTensorHandle* out, AtenTensorHandle* last_hidden, AtenTensorHandle* last_cell) {
  return qompose_x86::without_exceptions("native_lstm", [&] {
    AtenTensorHandle results[3];
    qompose_x86::call_recurrent(x, hidden, &cell, weights, starts, values, sizes, count, results);
    *out = results[0];
    *last_hidden = results[1];
    *last_cell = results[2];
  });
}

extern "C" inline AOTITorchError aoti_torch_cpu_native_gru(AtenTensorHandle x, AtenTensorHandle hidden,
                                                           AtenTensorHandle weights, AtenTensorHandle starts,
                                                           AtenTensorHandle values, const int64_t* sizes,
                                                           int64_t count, AtenTensorHandle* out,
                                                           AtenTensorHandle* last_hidden) {
  return qompose_x86::without_exceptions("native_gru", [&] {
    AtenTensorHandle results[2];
    qompose_x86::call_recurrent(x, hidden, nullptr, weights, starts, values, sizes, count, results);
    *out = results[0];
    *last_hidden = results[1];
  });
}
