# SPDX-License-Identifier: Apache-2.0
"""The processor that a quantized model requires: VNNI for weights of eight bits, AVX2 for seven.

Without VNNI oneDNN's sums of int8 products saturate for weights beyond `exactness.NARROW`. Such weights are
then multiplied exactly, which is slow, and which nobody would notice in the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from qompose.backend import RuleUse
from qompose.spec import QuantizationSpecBase

from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.operators.linear_float8 import DTYPES

ISA: Final = "isa"
EXACT: Final = "vnni"
ANY: Final = "avx2"


def requirements(uses: Sequence[RuleUse]) -> dict[str, str]:
    """Return what `Backend.requirements` does: {"isa": "vnni"} or {"isa": "avx2"}, nothing without products.

    Weights of `linear_packed` require nothing: it is exact on every processor. Nor does float8, whose
    sums are floats.
    """
    weights = [
        use.specs["weight"]
        for use in uses
        if "weight" in use.specs
        and use.mode != "weight-only"
        and not _is_by_row(use)
        and getattr(use.specs["weight"], "dtype", None) not in DTYPES
    ]
    if not weights:
        return {}
    return {ISA: ANY if all(map(_is_narrow, weights)) else EXACT}


def _is_by_row(use: RuleUse) -> bool:
    return getattr(use.specs.get("activation"), "block_size", None) is not None


def _is_narrow(weight: QuantizationSpecBase) -> bool:
    low, high = getattr(weight, "quant_min", None), getattr(weight, "quant_max", None)
    return (
        low is not None
        and high is not None
        and exactness.NARROW[0] <= low
        and high <= exactness.NARROW[1]
    )


def objection(required: Mapping[str, str]) -> str | None:
    """Return what `Backend.objection` does: why this processor runs the model on slow operators, or None."""
    if required.get(ISA) != EXACT or exactness.vnni_exact():
        return None
    return (
        f"{exactness.reason()}. Run it on a processor with VNNI, or quantize it again with "
        f'7-bit weights: get_default_x86_inductor_quantization_config(isa="{ANY}")'
    )
