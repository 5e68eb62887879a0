// SPDX-License-Identifier: Apache-2.0
// How many threads work on a call, and which part of it is whose.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace qompose_x86 {

// Products of bytes that are worth a thread: starting threads and waiting for them takes as long as some
// hundred thousand.
constexpr int64_t PRODUCTS_EACH = 1 << 18;

// Threads for so many products in so many parts: at most `available`, each with enough to do.
inline int threads_for(int64_t products, int64_t parts, int available) {
  const int64_t worth = std::min(products / PRODUCTS_EACH, parts);
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(worth, available)));
}

// Call work(thread, from, to) so that all of `parts` are covered, by at most so many threads. `work` must not
// throw: an exception that leaves a parallel region ends the process. Hence also no memory is asked for
// there.
template <typename Work>
void in_parallel(int threads, int64_t parts, Work work) {
  if (threads == 1) return work(0, 0, parts);
#pragma omp parallel num_threads(threads)
  {
    const int64_t id = omp_get_thread_num(), count = omp_get_num_threads();
    work(static_cast<int>(id), parts * id / count, parts * (id + 1) / count);
  }
}

}  // namespace qompose_x86
