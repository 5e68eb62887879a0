# SPDX-License-Identifier: Apache-2.0
"""The specifications around a constraint: those it takes, at their edges, and those it must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from qompose import (
    MinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    QuantizationConfig,
    QuantizationSpec,
    Rule,
    TensorConstraint,
)
from qompose.errors import ConfigError
from qompose.numerics import PER_CHANNEL, quantized_range
from qompose.specs import describe_spec

DTYPES = (torch.int8, torch.uint8, torch.int16)
PER_TENSOR_SCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric)
SCHEMES = (
    *PER_TENSOR_SCHEMES,
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)
ROLES = {
    "activation": "input_activation",
    "weight": "weight",
    "output": "output_activation",
}
"""By role: the field of a configuration."""


@dataclass(frozen=True)
class Limit:
    """A configuration at an edge of what a rule takes, or beyond it: `config` differs in one role."""

    role: str
    spec: QuantizationSpec
    config: QuantizationConfig

    def __str__(self) -> str:
        return f"{self.role} {describe_spec(self.spec)}"


def limits(rule: Rule, config: QuantizationConfig) -> Iterator[Limit]:
    """Yield configurations that differ from `config` in the specification of one role of a rule."""
    for role, base in rule.specs_for(config).items():
        if not isinstance(base, QuantizationSpec):
            continue
        for spec in _specs(role, base, rule.accepts.get(role)):
            fields: dict[str, Any] = {ROLES[role]: spec}
            changed = replace(config, **fields, name=f"{role} {describe_spec(spec)}")
            if rule.shares and role == "activation" and config.output_activation is not None:
                changed = replace(changed, output_activation=spec)
            laid_out = rule.specs_for(changed)[role]
            if isinstance(laid_out, QuantizationSpec):
                yield Limit(role, laid_out, changed)


def _specs(
    role: str, base: QuantizationSpec, constraint: TensorConstraint | None
) -> Iterator[QuantizationSpec]:
    """Yield every type with every scheme in its full range, and the ranges, axes and blocks around."""
    schemes = SCHEMES if role == "weight" or constraint is not None else PER_TENSOR_SCHEMES
    for dtype in DTYPES:
        for scheme in schemes:
            for low, high in _ranges(dtype, constraint):
                yield from _made(base, constraint, dtype, scheme, low, high)
    if base.dtype.is_floating_point:  # a cast has no range, axis or blocks
        return
    axis = 1 if constraint is None or constraint.ch_axis != 1 else 0
    low, high = quantized_range(base.dtype, base.quant_min, base.quant_max)
    facts = (base, constraint, base.dtype, torch.per_channel_symmetric, low, high)
    yield from _made(*facts, axis=axis)
    yield from _made(*facts, blocks=(-1,))


def _ranges(dtype: torch.dtype, constraint: TensorConstraint | None) -> Iterator[tuple[int, int]]:
    """Yield the whole type, the widest range that a constraint leaves, and one step around its bounds."""
    info = torch.iinfo(dtype)
    least, most = info.min, info.max
    if constraint is not None:
        low, high = constraint.quant_min_lower_bound, constraint.quant_max_upper_bound
        least = info.min if low is None else max(low, info.min)
        most = info.max if high is None else min(high, info.max)
        if constraint.quant_range is not None:
            least, most = constraint.quant_range
    half = (-((-least) // 16), most // 16)
    for low, high in dict.fromkeys(
        [(info.min, info.max), (least, most), (least - 1, most), (least, most + 1), half]
    ):
        if info.min <= low <= 0 <= high <= info.max and low < high:
            yield low, high


def _made(
    base: QuantizationSpec,
    constraint: TensorConstraint | None,
    dtype: torch.dtype,
    scheme: torch.qscheme,
    low: int,
    high: int,
    *,
    axis: int | None = None,
    blocks: tuple[int, ...] | None = None,
) -> Iterator[QuantizationSpec]:
    """Yield the specification, if there is such a one."""
    per_channel = scheme in PER_CHANNEL and blocks is None
    if axis is None:
        axis = base.ch_axis if base.ch_axis is not None else 0
    observer: Any = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    observer = PerBlockMinMaxObserver if blocks is not None else observer
    least = constraint.scale_min_lower_bound if constraint is not None else None
    factory = observer if least is None else observer.with_args(eps=least)
    try:
        yield replace(
            base,
            dtype=dtype,
            qscheme=scheme,
            quant_min=low,
            quant_max=high,
            ch_axis=axis if per_channel else None,
            block_size=blocks,
            observer_or_fake_quant_ctr=PlaceholderObserver if base.is_dynamic else factory,
        )
    except ConfigError:
        return


def beyond(constraint: TensorConstraint, spec: QuantizationSpec) -> str | None:
    """Return which declared bound a specification breaks, None where it breaks none.

    This reads the constraint's fields alone, and so is a check on what its `objection` says.
    """
    low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
    per_channel = spec.qscheme in PER_CHANNEL and spec.block_size is None
    least, most = constraint.quant_min_lower_bound, constraint.quant_max_upper_bound
    broken = {
        f"dtypes {constraint.dtypes}": spec.dtype not in constraint.dtypes,
        f"qschemes {constraint.qschemes}": spec.qscheme not in constraint.qschemes,
        "blocks=False": spec.block_size is not None and not constraint.blocks,
        f"block_sizes {constraint.block_sizes}": constraint.block_sizes is not None
        and spec.block_size not in constraint.block_sizes,
        f"ch_axis={constraint.ch_axis}": per_channel
        and constraint.ch_axis not in (None, spec.ch_axis),
        f"quant_min_lower_bound={least}": least is not None and low < least,
        f"quant_max_upper_bound={most}": most is not None and high > most,
        f"quant_range={constraint.quant_range}": constraint.quant_range not in (None, (low, high)),
    }
    return next((name for name, is_broken in broken.items() if is_broken), None)


def covering(accepted: list[Limit]) -> list[Limit]:
    """Return few of the accepted limits: each type with each scheme, and each other range once."""
    seen: set[object] = set()
    chosen = []
    for limit in accepted:
        spec = limit.spec
        kind = (limit.role, spec.dtype, spec.qscheme, spec.ch_axis, spec.block_size)
        extent = (limit.role, spec.dtype, spec.quant_min, spec.quant_max)
        if kind not in seen or extent not in seen:
            chosen.append(limit)
        seen.update((kind, extent))
    return chosen
