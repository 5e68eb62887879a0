// SPDX-License-Identifier: Apache-2.0
// The kernels and the operators of native/ as functions of C, for tests that compile no model.
#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "shims.h"

static std::atomic<int> allocations{0}, allocations_in_parallel{0};

void* operator new(std::size_t size) {
  ++allocations;
  allocations_in_parallel += omp_in_parallel();
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" int count_allocations(bool in_parallel) {
  return in_parallel ? allocations_in_parallel : allocations;
}

extern "C" int threads(int64_t products, int64_t parts, int available) {
  return qompose_x86::threads_for(products, parts, available);
}

extern "C" AOTITorchError run(int threads, bool by_channel, const uint8_t* x, const int64_t* dims,
                              const int8_t* weight, const int32_t* start, const float* scale,
                              const float* bias, const float* per_step, const void* other, int other_kind,
                              const int64_t* sizes, const double* ends, void* out) {
  using namespace qompose_x86;
  return without_exceptions("run", [&] {
    run(threads, by_channel, image_of(x, dims, sizes), {weight, start, scale, bias, per_step}, other,
        static_cast<Kind>(other_kind), sizes, ends, out);
  });
}

extern "C" void quantize(int threads, const float* x, int64_t images, int64_t channels, int64_t pixels,
                         float inverse, int zp, int low, int high, uint8_t* out) {
  qompose_x86::quantize_planes({x, images, channels, pixels, inverse, zp, low, high}, out, threads);
}

extern "C" AOTITorchError operator_of(bool by_channel, AtenTensorHandle* tensors, AtenTensorHandle* per_step,
                                      AtenTensorHandle* other, const int64_t* sizes, const double* ends,
                                      AtenTensorHandle* result) {
  const auto run = by_channel ? aoti_torch_cpu_native_depthwise : aoti_torch_cpu_native_product;
  return run(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], per_step, other, sizes,
             qompose_x86::SIZES, ends, qompose_x86::ENDS, result);
}

// `sizes`: as in recurrent.py; `tensors`: x, hidden, cell or null, weights, starts, values, three
// results.
extern "C" AOTITorchError recurrent(int threads, const int64_t* sizes, int64_t steps, int64_t batch,
                                    const int64_t* counts, void* const* tensors) {
  using namespace qompose_x86;
  return without_exceptions("recurrent", [&] {
    Recurrent r = recurrent_of(sizes, steps, batch);
    const Totals totals = totals_of(r);
    require(totals.weights == counts[0] && totals.starts == counts[1] && totals.values == counts[2],
            "counts");
    r.x = static_cast<const float*>(tensors[0]);
    r.first_hidden = static_cast<const float*>(tensors[1]);
    r.first_cell = static_cast<const float*>(tensors[2]);
    r.weights = static_cast<const int8_t*>(tensors[3]);
    r.starts = static_cast<const int32_t*>(tensors[4]);
    r.values = static_cast<const float*>(tensors[5]);
    r.out = static_cast<float*>(tensors[6]);
    r.last_hidden = static_cast<float*>(tensors[7]);
    r.last_cell = static_cast<float*>(tensors[8]);
    recurrent(r, threads);
  });
}

// What describes attention but its numbers. `sizes`: batches, heads, shared heads, queries, keys, width,
// value width; `tensors`: queries, keys, values, a mask or null.
template <typename T, typename Description, typename K = T>
static Description attention_of(const int64_t* sizes, const void* const* tensors, const int64_t* strides,
                                int mask_kind) {
  using namespace qompose_x86;
  const auto at = [&](int i, auto* data) {
    const int64_t* s = strides + 4 * i;
    return Strided<std::remove_pointer_t<decltype(data)>>{data, {s[0], s[1], s[2], s[3]}};
  };
  Description a = {{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]}};
  a.q = at(0, (T*)tensors[0]);
  a.k = at(1, (K*)tensors[1]);
  a.v = at(2, (K*)tensors[2]);
  a.mask_kind = static_cast<MaskKind>(mask_kind);
  a.mask = at(3, (uint8_t*)tensors[3]);
  return a;
}

extern "C" void float_attention(int threads, const int64_t* sizes, const void* const* tensors,
                                const int64_t* strides, int mask_kind, bool causal, double scale,
                                double hidden, bool safe_softmax, void* out) {
  using namespace qompose_x86;
  auto a = attention_of<float, FloatAttention>(sizes, tensors, strides, mask_kind);
  a.causal = causal;
  a.scale = static_cast<float>(scale);
  a.hidden = static_cast<float>(hidden);
  a.safe_softmax = safe_softmax;
  attend(a, out, threads);
}

// Scales are contiguous, (batches, shared heads, keys).
extern "C" void cache_attention(int threads, const int64_t* sizes, const void* const* tensors,
                                const int64_t* strides, int mask_kind, const float* k_scales,
                                const float* v_scales, bool causal, double scale, void* out) {
  using namespace qompose_x86;
  auto a = attention_of<float, CacheAttention, int8_t>(sizes, tensors, strides, mask_kind);
  a.k_scales = {k_scales, {a.shared_heads * a.keys, a.keys, 1, 0}};
  a.v_scales = {v_scales, {a.shared_heads * a.keys, a.keys, 1, 0}};
  a.causal = causal;
  a.scale = static_cast<float>(scale);
  attend(a, out, threads);
}

#ifdef QOMPOSE_AVX512_VNNI
// `numbers`, `ends`: as in attention.py.
extern "C" void attention(int threads, const int64_t* sizes, const void* const* tensors,
                          const int64_t* strides, int mask_kind, const int64_t* numbers, const double* ends,
                          void* out) {
  using namespace qompose_x86;
  attend(described(attention_of<uint8_t, Attention>(sizes, tensors, strides, mask_kind), numbers, ends), out,
         threads);
}
#endif
