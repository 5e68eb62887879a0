# SPDX-License-Identifier: Apache-2.0
"""Variations of an example: other shapes, literals or specifications.

A pattern says nothing of ranks and literals, so a rule claims more than its example. What it claims, its
kernel must compute correctly. Specifications vary at the edges of what a constraint accepts, and beyond.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from qompose import QuantizationConfig, QuantizationSpec
from qompose.backend import Rule, TensorConstraint
from qompose.backend.pattern import Shape
from qompose.errors import ConfigError
from qompose.observers import (
    MinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.program.graph import arguments_of
from qompose.spec.qparams import CASTS, PER_CHANNEL, quantized_range
from qompose.spec.quantization_spec import describe_spec
from qompose.testing.trial import Example, Trial

DEPTH = 4096
"""How many products make one sum in the deepest variation."""


@dataclass(frozen=True)
class Variation:
    """An example that differs in one respect from that of a trial, with sizes that are not scaled."""

    label: str
    example: Example


def of_shapes(trial: Trial) -> Iterator[Variation]:
    """Yield one batch, a dimension more, one less, and long sums."""
    shapes, example = trial.built.shapes, trial.terms.example
    inputs = [
        i
        for i, (shape, stored) in enumerate(zip(shapes, trial.terms.stored, strict=True))
        if not stored and not callable(shape) and shape
    ]
    found: dict[str, dict[int, tuple[int, ...]] | None] = {
        "a batch of 1": {i: (1, *_sizes(shapes[i])[1:]) for i in inputs},
        "inputs with one dimension more": {i: (3, *_sizes(shapes[i])) for i in inputs},
        "inputs with one dimension less": {i: _sizes(shapes[i])[1:] for i in inputs},
        f"sums of {DEPTH} products": _deep(trial, shapes, inputs),
    }
    for label, changed in found.items():
        if changed and all(changed.values()):
            others = tuple(changed.get(i, shape) for i, shape in enumerate(shapes))
            if others != tuple(shapes):
                yield Variation(label, replace(example, shapes=others))


def _sizes(shape: Shape) -> tuple[int, ...]:
    assert not callable(shape)
    return shape


def _deep(
    trial: Trial, shapes: Sequence[Shape], inputs: Sequence[int]
) -> dict[int, tuple[int, ...]] | None:
    """Return the shapes that make sums long, of a product with a weight or of two inputs."""
    rule, names = trial.terms.rule, trial.terms.example.names
    if rule.weight in names and inputs:
        (place, *_), number = inputs, names.index(rule.weight)
        given, weight = _sizes(shapes[place]), _sizes(shapes[number])
        axis = -1 if len(weight) == 2 else 1
        if len(weight) < 2 or given[axis] % weight[1]:
            return None
        depth = max(1, DEPTH // math.prod(weight[2:]))
        wide = [2, *given[1:]]
        wide[axis] = depth * (given[axis] // weight[1])
        return {place: tuple(wide), number: (weight[0], depth, *weight[2:])}
    if len(inputs) == 2:
        first, second = (_sizes(shapes[i]) for i in inputs)
        if len(shapes) == 2 and first[-1:] == second[-2:-1]:
            return {
                inputs[0]: (*first[:-1], DEPTH),
                inputs[1]: (*second[:-2], DEPTH, second[-1]),
            }
    return None


def _more(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [v + 1 for v in value] or [1]
    return value + 1


def _another_dim(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_another_dim(v) for v in value]
    return value - 1 if value != 0 else 1


_LITERALS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("stride", "padding", "dilation", "output_size", "kernel_size"), _more),
    **dict.fromkeys(("shifts", "repeats"), _more),
    **dict.fromkeys(("dim", "dims", "dim0", "dim1"), _another_dim),
    **dict.fromkeys(("ceil_mode", "count_include_pad", "keepdim"), lambda value: not value),
    **dict.fromkeys(("alpha", "beta", "scale", "input_scale"), lambda value: value * 2),
    **dict.fromkeys(("max_val", "max"), lambda value: value / 4),
    **dict.fromkeys(("min_val", "min"), lambda value: value / 4 + 0.125),
    "negative_slope": lambda value: value + 0.25,
    "groups": lambda value: 2 if value == 1 else 1,
    "divisor_override": lambda value: 3,
    "approximate": lambda value: "tanh" if value == "none" else "none",
}
"""By the name of an argument in an operator's schema: another value of it."""


def of_literals(trial: Trial) -> Iterator[Variation]:
    """Yield the example with one literal argument of its operators changed, where it still runs."""
    example, tensors = trial.terms.example, _tensors(trial)
    traced = _traced(example.function, tensors)
    if traced is None:
        return
    for node in traced.graph.nodes:
        if node.target not in example.operators:
            continue
        for name, value in arguments_of(node).items():
            if name not in _LITERALS or value is None or isinstance(value, Node):
                continue
            found = _changed(traced, node, name, value, tensors)
            if found is not None:
                function, shapes = found
                said = f"{node.target._opname} with {name}={_LITERALS[name](value)}"
                yield Variation(said, replace(example, function=function, shapes=shapes))


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def _tensors(trial: Trial) -> list[Tensor]:
    """Return what the example's function is called with, in order."""
    inputs, row = iter(trial.batches("example", 1)[0]), trial.model.row
    own = {**dict(row.named_parameters()), **dict(row.named_buffers())}
    return [
        own[f"own_{name}"].detach() if stored else next(inputs)
        for name, stored in zip(trial.terms.example.names, trial.terms.stored, strict=True)
    ]


def _traced(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> GraphModule | None:
    """Return the function's graph, None where it has inputs or outputs besides the function's own."""
    with torch.no_grad():
        program = torch.export.export(_Function(function), tuple(x.clone() for x in tensors))
    graph = program.graph_module.graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    whole = len(places) == len(tensors) and len(output.args[0]) == 1
    return program.graph_module if whole else None


def _changed(
    traced: GraphModule, node: Node, name: str, value: Any, tensors: Sequence[Tensor]
) -> tuple[Callable[..., Tensor], tuple[Shape, ...]] | None:
    """Return the function with another literal and the shapes that it takes, None where it does not run."""
    module = copy.deepcopy(traced)
    same = next(n for n in module.graph.nodes if n.name == node.name)
    shapes = [tuple(x.shape) for x in tensors]
    try:
        other = _LITERALS[name](value)
        same.args, same.kwargs = (), {**arguments_of(same), name: other}
        if name == "groups":
            weight = [n for n in traced.graph.nodes if n.op == "placeholder"].index(node.args[1])
            first, inner, *rest = shapes[weight]
            shapes[weight] = (first, inner * value // other, *rest)

        def function(*given: Tensor) -> Tensor:
            result: Tensor = Interpreter(module).run(*given)[0]
            return result

        with torch.no_grad():
            function(
                *(
                    x if x.shape == s else torch.ones(s)
                    for x, s in zip(tensors, shapes, strict=True)
                )
            )
    except Exception:  # what does not run in float is not a variation
        return None
    return function, tuple(shapes)


DTYPES = (torch.int8, torch.uint8, torch.int16)
PER_TENSOR_SCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric)
SCHEMES = (
    *PER_TENSOR_SCHEMES,
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)
ROLES = {"activation": "input_activation", "weight": "weight", "output": "output_activation"}
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
    kinds = [(dtype, scheme) for dtype in DTYPES for scheme in schemes]
    own, axis = base.ch_axis or 0, 1 if constraint is None or constraint.ch_axis != 1 else 0
    wanted: list[tuple[Any, ...]] = [
        (*kind, *ends, own, None) for kind in kinds for ends in _ranges(kind[0], constraint)
    ]
    if base.dtype not in CASTS:  # a cast has no range, axis or blocks
        ends = quantized_range(base.dtype, base.quant_min, base.quant_max)
        around = ((axis, None), (own, (-1,)))
        wanted += [(base.dtype, torch.per_channel_symmetric, *ends, *each) for each in around]
    least = constraint.scale_min_lower_bound if constraint is not None else None
    for dtype, scheme, low, high, axis, blocks in wanted:
        per_channel = scheme in PER_CHANNEL and blocks is None
        observer: Any = PerChannelMinMaxObserver if per_channel else MinMaxObserver
        observer = PerBlockMinMaxObserver if blocks is not None else observer
        factory = observer if least is None else observer.with_args(eps=least)
        with suppress(ConfigError):  # there is no such specification
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


def _ranges(dtype: torch.dtype, constraint: TensorConstraint | None) -> Iterator[tuple[int, int]]:
    """Yield the whole type, the widest range that a constraint leaves, and one step around its bounds.

    Some are no ranges of the type, which a specification refuses.
    """
    least, most = whole = quantized_range(dtype, None, None)
    if constraint is not None:
        low, high = constraint.quant_min_lower_bound, constraint.quant_max_upper_bound
        least = whole[0] if low is None else max(low, whole[0])
        most = whole[1] if high is None else min(high, whole[1])
        if constraint.quant_range is not None:
            least, most = constraint.quant_range
    half = (-((-least) // 16), most // 16)
    yield from dict.fromkeys([whole, (least, most), (least - 1, most), (least, most + 1), half])


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
