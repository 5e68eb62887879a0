// SPDX-License-Identifier: Apache-2.0
// Small functions of kernels. torch compiles a package's file with -O1, under which GCC calls templates'
// small functions, whatever is asked for around them: a row of packed weights then takes three times as long.
#pragma once

#define QOMPOSE_INLINE __attribute__((always_inline)) inline
