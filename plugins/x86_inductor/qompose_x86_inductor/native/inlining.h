// SPDX-License-Identifier: Apache-2.0
// Small functions of kernels, which compilers must not call whatever they make of their callers' size: a row
// of packed weights once took seven times as long. Functions of the standard library are called, too, where a
// package is compiled with -O1: an exponential that ran through an `initializer_list` took three times as
// long.
#pragma once

#include <type_traits>
#include <utility>

#define QOMPOSE_INLINE __attribute__((always_inline)) inline
#define QOMPOSE_INLINED __attribute__((always_inline))  // of a lambda, before its body

namespace qompose_x86 {

template <typename Body, int... I>
QOMPOSE_INLINE void call_for(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}

// Call `body` for the numbers below N, each a constant, so that arrays at such places may be registers.
template <int N, typename Body>
QOMPOSE_INLINE void unrolled(const Body& body) {
  call_for(body, std::make_integer_sequence<int, N>{});
}

}  // namespace qompose_x86
