# SPDX-License-Identifier: Apache-2.0
"""The processor that a quantized model requires: without VNNI, sums of products saturate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from qompose.backend import RuleUse

from qompose_onnx.configs import NARROW
from qompose_onnx.names import TENSORRT
from qompose_onnx.runtimes import sums_are_exact_here

ISA: Final = "isa"
EXACT: Final = "vnni"
ANY: Final = "any"
ELSEWHERE: Final = (f"_{TENSORRT}", "_16_bits")
"""The ends of the names of rules for accelerators."""


def requirements(uses: Sequence[RuleUse]) -> dict[str, str]:
    """Return what `Backend.requirements` does: {"isa": "vnni"} or {"isa": "any"}, nothing without products.

    Weight-only products are computed in float, and others are not for processors: they require nothing.
    """
    weights: list[Any] = [
        use.specs["weight"]
        for use in uses
        if use.mode != "weight-only" and "weight" in use.specs and not use.rule.endswith(ELSEWHERE)
    ]
    if not weights:
        return {}
    narrow = all(NARROW[0] <= w.quant_min and w.quant_max <= NARROW[1] for w in weights)
    return {ISA: ANY if narrow else EXACT}


def objection(required: Mapping[str, str]) -> str | None:
    """Return what `Backend.objection` does: why sums saturate on this processor, or None."""
    if required.get(ISA) != EXACT or sums_are_exact_here():
        return None
    return (
        "results are wrong on this processor because it has no VNNI: ONNX Runtime and "
        "OpenVINO add products of uint8 and int8 in 16 bits, and the sums saturate. Run the "
        "model on a processor with VNNI, or quantize it again with 7-bit weights: "
        "get_onnx_quantization_config(bits=7)"
    )
