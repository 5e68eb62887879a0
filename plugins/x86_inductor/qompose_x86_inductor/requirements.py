# SPDX-License-Identifier: Apache-2.0
"""What a quantized model asks of the processor: VNNI for weights of eight bits, nothing newer for seven.

Without VNNI oneDNN's sums of int8 products saturate for weights beyond `isa.NARROW`. Such weights are
then multiplied exactly, by operators that are slow (`packing`), which nobody would notice in the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from qompose.backend import RuleUse
from qompose.spec import QuantizationSpecBase

from qompose_x86_inductor import isa

ISA: Final = "isa"
EXACT: Final = "vnni"
ANY: Final = "avx2"


def asked_by(uses: Sequence[RuleUse]) -> dict[str, str]:
    """What `Backend.requirements` returns: {"isa": "vnni"} or {"isa": "avx2"}, nothing without products.

    Weight-only products are computed in float, so they ask for nothing.
    """
    weights = [
        use.specs["weight"] for use in uses if use.mode != "weight-only" and "weight" in use.specs
    ]
    if not weights:
        return {}
    return {ISA: ANY if all(map(_is_narrow, weights)) else EXACT}


def _is_narrow(weight: QuantizationSpecBase) -> bool:
    low, high = getattr(weight, "quant_min", None), getattr(weight, "quant_max", None)
    return low is not None and high is not None and isa.NARROW[0] <= low and high <= isa.NARROW[1]


def objection(asked: Mapping[str, str]) -> str | None:
    """What `Backend.objection` returns: why this processor runs the model on slow operators, or None."""
    if asked.get(ISA) != EXACT or isa.vnni_exact():
        return None
    return (
        f"{isa.reason()}. Run it on a processor with VNNI, or quantize again with weights of seven bits: "
        f'get_default_x86_inductor_quantization_config(isa="{ANY}")'
    )
