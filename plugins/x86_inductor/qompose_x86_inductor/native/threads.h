// SPDX-License-Identifier: Apache-2.0
// How many threads work on a call, and which part of it is whose.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace qompose_x86 {

// Products of bytes that are worth a thread: starting threads and waiting for them takes as long as some
// hundred thousand, or half as many without VNNI.
#ifdef __AVX512VNNI__
constexpr int64_t PRODUCTS_EACH = 1 << 18;
#else
constexpr int64_t PRODUCTS_EACH = 1 << 17;
#endif

// Threads for so many products in so many parts: at most `available`, each with enough to do.
inline int threads_for(int64_t products, int64_t parts, int available) {
  const int64_t worth = std::min(products / PRODUCTS_EACH, parts);
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(worth, available)));
}

// Pieces of work for each thread: one that is held up, by another program or a slower core, leaves some of
// its pieces to the others.
constexpr int64_t PIECES = 8;

// How many pieces of a thread's share were taken, on a cache line of its own.
struct alignas(64) Taken {
  std::atomic<int64_t> pieces{0};
};

// Call work(thread, from, to) for pieces that together are all of `parts`, by at most so many threads. Each
// has its own share, of the same place in each call, so that what it wrote in one layer it reads in the next:
// from the cache of another core that may take several times as long. Then it helps the others. `work` must
// not throw: an exception that leaves a parallel region ends the process. Hence also no memory is asked for
// there. `pieces`: for each thread, 1 where each piece has something to prepare.
template <typename Work>
void in_parallel(int threads, int64_t parts, Work work, int64_t pieces = PIECES) {
  if (threads == 1) return work(0, 0, parts);
  const int64_t all = std::min(parts, pieces * threads);
  std::vector<Taken> taken(threads);
#pragma omp parallel num_threads(threads)
  {
    const int id = omp_get_thread_num();
    for (int after = 0; after < threads; ++after) {
      const int owner = (id + after) % threads;
      const int64_t first = all * owner / threads, stop = all * (owner + 1) / threads;
      for (int64_t piece;
           (piece = first + taken[owner].pieces.fetch_add(1, std::memory_order_relaxed)) < stop;)
        work(id, parts * piece / all, parts * (piece + 1) / all);
    }
  }
}

}  // namespace qompose_x86
