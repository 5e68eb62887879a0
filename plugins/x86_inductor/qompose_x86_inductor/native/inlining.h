// SPDX-License-Identifier: Apache-2.0
// Small functions of kernels, which compilers must not call whatever they make of their callers' size: a row
// of packed weights once took seven times as long.
#pragma once

#define QOMPOSE_INLINE __attribute__((always_inline)) inline
