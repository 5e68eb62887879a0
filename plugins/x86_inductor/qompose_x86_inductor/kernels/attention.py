# SPDX-License-Identifier: Apache-2.0
"""The calls that replace attention, torch's operator or what it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from qompose.backend import Kernel, NotLowerable, Region
from torch.fx import Node

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.kernels.static import bounded, requantization
from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.onednn.arguments import NAMESPACE, Output
from qompose_x86_inductor.operators.attention import AttentionCall, Quantized

aten = torch.ops.aten
_ATTENTION: Final = getattr(torch.ops, NAMESPACE).attention.default


def _operator(region: Region) -> Node:
    """Emit torch's operator."""
    scale, mask, causal = (
        region.argument("output", name) for name in ("scale", "attn_mask", "is_causal")
    )
    query = region.inputs("query")[0]
    scale = 1 / math.sqrt(query.meta["val"].shape[-1]) if scale is None else scale
    return _attention(region, mask, scale, causal=causal, safe_softmax=True)


def _written_out(region: Region) -> Node:
    """Emit products and a softmax, whose keys come with their axes swapped."""
    scale = 1.0
    if region.has("scale"):
        number, operator = region.argument("scale", "other"), str(region.node("scale").target)
        scale = 1 / number if "div" in operator else number
    mask = None
    if region.has("add"):
        sources = (region.argument("add", name) for name in ("self", "other"))
        inside = region.node("scale" if region.has("scale") else "scores")
        (mask,) = (source for source in sources if source is not inside)
    return _attention(region, mask, scale, causal=False, safe_softmax=False)


def _attention(
    region: Region, mask: Node | None, scale: float, *, causal: bool, safe_softmax: bool
) -> Node:
    query, key, value = (
        Quantized(found.node, found.scale, found.zero_point)  # type: ignore[arg-type]
        for found in map(region.quantized, ("query", "key", "value"))
    )
    if not safe_softmax:
        turned: Any = region.step(aten.transpose.int, key.tensor, -2, -1)
        key = key._replace(tensor=turned)
    given_mask: Any = mask
    out = Output(*requantization(region))
    numbers = (float(scale), causal, safe_softmax)
    call = AttentionCall(query, key, value, given_mask, *numbers, out)
    dtype = region.output.dtype if region.output is not None else None
    return bounded(region, region.call(_ATTENTION, *call.write(), dtype=dtype))


def _kernel(emit: Callable[[Region], Node]) -> Kernel:
    """Return the kernel on integers; where the processor has none, the operator computes in float32."""

    def on_integers(region: Region) -> Node:
        if not exactness.vnni_exact():
            raise NotLowerable(exactness.reason())
        return emit(region)

    name = "qompose_x86.attention"
    slow = Kernel(f"{name} in float32", emit, float_arithmetic=True)
    return Kernel(name, on_integers, otherwise=slow)


KERNEL: Final = _kernel(_operator)
WRITTEN_OUT: Final = _kernel(_written_out)
