# SPDX-License-Identifier: Apache-2.0
"""The C++ of packed_linear.h: as a function of this process, and for programs that torch compiles.

It is for any processor, and fast with AVX2 and AVX-512.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from qompose_x86_inductor.native import code

_CODE: Final = """{included}
#include <new>
extern "C" int linear_packed(const float* x, const uint8_t* weight, const void* scales,
                             const int8_t* zero_points, const float* columns, const float* bias, float* out,
                             const int64_t* n, int threads) {{
  using namespace qompose_x86::packed;
  try {{
    compute({{{{n[0], n[3], n[2], n[4], int(n[5]), RowMode(n[6]), weight, scales, n[8] != 0, zero_points,
               columns, bias, out, n[2]}}}},
            x, n[1], threads);
    return 0;
  }} catch (const std::bad_alloc&) {{
    return 1;
  }} catch (...) {{
    return 2;
  }}
}}
"""

Compute = Callable[[Tensor, tuple[Tensor | None, ...], tuple[int, ...]], Tensor]
"""Of rows (M, in), the tensors and the numbers of `operators.linear_packed`, returns (M, out)."""


@functools.cache
def compiled() -> Compute | None:
    """Return what runs the C++; None where QOMPOSE_NATIVE_CODE=0, or it does not compile (a warning).

    Raises:
        UserError: the variable is neither 0 nor 1.
    """
    text = _CODE.format(included=code.included("packed_linear.h"))
    function = code.loaded(text, "linear_packed", "packed weights")
    if function is None:
        return None
    return functools.partial(_call, function)


def _call(
    function: Callable[..., int], x: Tensor, tensors: tuple[Tensor | None, ...], n: tuple[int, ...]
) -> Tensor:
    out = x.new_empty(x.shape[0], n[0])
    scales = tensors[1]
    assert scales is not None
    numbers = (*x.shape, *n, scales.dtype == torch.bfloat16)
    failed = function(
        *(
            None if each is None else ctypes.c_void_p(each.data_ptr())
            for each in (x, *tensors, out)
        ),
        (ctypes.c_int64 * len(numbers))(*numbers),
        torch.get_num_threads(),
    )
    if failed == 1:
        raise MemoryError(
            f"qompose_x86::linear_packed: out of memory for an input of shape {tuple(x.shape)}"
        )
    if failed:
        raise RuntimeError("qompose_x86::linear_packed: C++ kernel failed")
    return out


def shims() -> dict[str, str]:
    """Return the texts for torch's option ``aot_inductor.custom_ops_to_c_shims``, by the operator's name."""
    one = (*[code.HANDLE] * 3, *[code.OPTIONAL] * 3, code.INTEGERS)
    arguments = {
        "linear_packed": one, "linears_packed": (code.HANDLE, code.OPTIONALS, code.INTEGERS)
    }  # fmt: skip
    declared = {name: code.declaration(name, *types) for name, types in arguments.items()}
    return {
        name: code.with_code(text, "packed_linear_shim.h", None) for name, text in declared.items()
    }
