# SPDX-License-Identifier: Apache-2.0
"""The operator ``native_cache_attention``, which is computed in C++ of our own (cache_attention.h).

``query`` is float32 (B, heads, L, E); ``key`` and ``value`` are int8 (B, H, S, E) and (B, H, S, V), whose
columns lie side by side, with float32 scales (B, H, S, 1). All else is as for ``native_float_attention``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from qompose_x86_inductor.native import code, float_attention, processor
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.registration import register


def reference(
    query: Tensor,
    key: Tensor,
    key_scales: Tensor,
    value: Tensor,
    value_scales: Tensor,
    *others: Any,
) -> Tensor:
    """Return what the operator computes, by torch's attention."""
    return float_attention.reference(query, key * key_scales, value * value_scales, *others)


_CODE: Final = """{included}
#include <new>
extern "C" int cache_attention(const void* const* tensors, const int64_t* n, const int64_t* strides,
                               double scale, void* out, int threads) {{
  using namespace qompose_x86;
  const auto at = [&](int i, auto* data) {{
    const int64_t* s = strides + 4 * i;
    return Strided<std::remove_pointer_t<decltype(data)>>{{data, {{s[0], s[1], s[2], s[3]}}}};
  }};
  CacheAttention a = {{{{n[0], n[1], n[2], n[3], n[4], n[5], n[6]}}}};
  a.q = at(0, (float*)tensors[0]);
  a.k = at(1, (int8_t*)tensors[1]);
  a.k_scales = at(2, (float*)tensors[2]);
  a.v = at(3, (int8_t*)tensors[3]);
  a.v_scales = at(4, (float*)tensors[4]);
  a.mask = at(5, (uint8_t*)tensors[5]);
  a.mask_kind = static_cast<MaskKind>(n[7]);
  a.causal = n[8] != 0;
  a.scale = static_cast<float>(scale);
  try {{
    attend(a, out, threads);
    return 0;
  }} catch (const std::bad_alloc&) {{
    return 1;
  }}
}}
"""
_TYPES: Final = (torch.float32, torch.int8, torch.float32, torch.int8, torch.float32)
"""Of the tensors before the mask."""


@functools.cache
def _compiled() -> Callable[..., int] | None:
    isa = processor.of_machine()
    if isa is None:
        return None
    text = _CODE.format(included=code.included("cache_attention.h", isa))
    return code.loaded(text, "cache_attention", "caches in eight bits")


def _compute(*arguments: Any) -> Tensor:
    function = _compiled()
    if function is None:
        return reference(*arguments)
    *tensors, mask, is_causal, scale = arguments
    _check(*tensors)
    if not all(x.stride(3) == 1 or x.shape[3] == 1 for x in tensors[1::2]):
        return reference(*arguments)  # a module was converted to another memory format
    query, key, _, value, _ = tensors
    batch, heads, length, width = query.shape
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    sizes = (batch, heads, key.shape[1], length, key.shape[2], width, value.shape[3])
    wide = query if mask is None else mask.expand(batch, heads, length, key.shape[2])
    operands = (*tensors, wide)
    out: Tensor = query.new_empty(batch, length, heads, value.shape[3])
    failed = function(
        (ctypes.c_void_p * 6)(*(x.data_ptr() for x in operands)),
        (ctypes.c_int64 * 9)(*sizes, kind, is_causal),
        (ctypes.c_int64 * 24)(*(step for x in operands for step in x.stride())),
        ctypes.c_double(scale),
        ctypes.c_void_p(out.data_ptr()),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(
            f"{NAMESPACE}::native_cache_attention: out of memory for queries of shape {tuple(query.shape)}"
        )
    return out


def _check(
    query: Tensor, key: Tensor, key_scales: Tensor, value: Tensor, value_scales: Tensor
) -> None:
    """Check what the C++ reads by address: a module may have been converted to another dtype."""
    tensors = query, key, key_scales, value, value_scales
    if tuple(x.dtype for x in tensors) != _TYPES:
        raise ValueError(
            f"{NAMESPACE}::native_cache_attention: expected queries, keys, their scales, values and "
            f"their scales of the dtypes {_TYPES}, got {[x.dtype for x in tensors]}; cast the model "
            "before quantizing it"
        )
    batch, heads, _, width = query.shape
    rows, groups = key.shape[:3], key.shape[1]
    scales = (*rows, 1)
    fit = rows == value.shape[:3] and scales == key_scales.shape == value_scales.shape
    shared = heads % groups == 0 if groups else heads == 0
    if not (fit and shared) or (key.shape[0], key.shape[3]) != (batch, width):
        raise ValueError(
            f"{NAMESPACE}::native_cache_attention: the shapes {[tuple(x.shape) for x in tensors]} do "
            "not fit each other; see the module's documentation"
        )


def _fake(query: Tensor, key: Tensor, _: Tensor, value: Tensor, *others: Any) -> Tensor:
    return float_attention.fake(query, key, value)


register(
    NAMESPACE,
    {
        "native_cache_attention": (
            "(Tensor query, Tensor key, Tensor key_scales, Tensor value, Tensor value_scales, Tensor? mask,"
            " bool is_causal, float scale) -> Tensor"
        )
    },
    {"native_cache_attention": (_compute, _fake)},
    torch.Tag.needs_contiguous_strides,
)
ATTENTION: Final = torch.ops.qompose_x86.native_cache_attention.default
DECLARATION: Final = code.declaration(
    "native_cache_attention", *[code.HANDLE] * 5, code.OPTIONAL, "int32_t", "double"
)
"""Its function of C, for what `products.shims` returns, whose header defines it."""
