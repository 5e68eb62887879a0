// SPDX-License-Identifier: Apache-2.0
// Tensors of torch, for operators that compiled programs include. Their functions are of C: what goes wrong
// is a line on stderr, as torch's own code for packages writes it, and an error code, which torch turns into
// an exception.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <exception>
#include <iostream>
#include <stdexcept>

namespace qompose_x86 {

inline void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("torch rejected a tensor");
}

inline void require(bool condition, const char* otherwise) {
  if (!condition) throw std::invalid_argument(otherwise);
}

// Run what may throw, for a caller that must not see it.
template <typename Body>
AOTITorchError without_exceptions(const char* name, Body body) noexcept {
  try {
    body();
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "Error: qompose_x86::" << name << ": " << error.what() << std::endl;
  } catch (...) {
    std::cerr << "Error: qompose_x86::" << name << std::endl;
  }
  return AOTI_TORCH_FAILURE;
}

template <typename T>
T* data_of(AtenTensorHandle tensor) {
  void* data = nullptr;
  check(aoti_torch_get_data_ptr(tensor, &data));
  return static_cast<T*>(data);
}

inline int32_t dtype_of(AtenTensorHandle tensor) {
  int32_t dtype = 0;
  check(aoti_torch_get_dtype(tensor, &dtype));
  return dtype;
}

inline int64_t count_of(AtenTensorHandle tensor) {
  int64_t count = 0;
  check(aoti_torch_get_numel(tensor, &count));
  return count;
}

// Data of a constant, which has so many values of a type.
template <typename T>
const T* values_of(AtenTensorHandle tensor, int32_t dtype, int64_t count) {
  require(dtype_of(tensor) == dtype, "a constant has the wrong dtype");
  require(count_of(tensor) == count, "a constant has the wrong size");
  return data_of<T>(tensor);
}

inline int available_threads() {
  uint32_t count = 1;
  check(torch_get_num_threads(&count));
  return static_cast<int>(count);
}

}  // namespace qompose_x86
