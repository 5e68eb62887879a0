# SPDX-License-Identifier: Apache-2.0
"""The small models that rows are tried in, and the quantizer of what stands around the row.

Some rows apply only behind quantized tensors, and kernels that give integers do so only where those are
wanted. So copies of tensors (`clone`, which runs on integers unchanged) may stand in front of the row and
behind it, and are quantized by a backend of the suite's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qompose import (
    Backend,
    FixedQParamsQuantizationSpec,
    Kernel,
    OperatorPattern,
    QuantizationConfig,
    QuantizationSpec,
    Rule,
    RuleQuantizer,
    on_integers,
)
from qompose.rules import STATIC

FRONT, ROW, BEHIND = "front", "row", "behind"
"""Paths of the modules in a model."""


class Copies(nn.Module):
    """Copies float tensors; what else it gets, it passes on."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return copies."""
        return tuple(x.clone() if x.is_floating_point() else x for x in tensors)


class Row(nn.Module):
    """Applies a function to inputs and to parameters of its own.

    Args:
        names: the function's parameters, in order; those in `parameters` belong to the module.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        names: Sequence[str],
        parameters: dict[str, Tensor],
    ) -> None:
        super().__init__()
        self.function, self.names = function, tuple(names)
        for name, value in parameters.items():
            self.register_parameter(f"own_{name}", nn.Parameter(value, requires_grad=False))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the function's output."""
        rest = iter(inputs)
        own = self._parameters
        arguments = [own[f"own_{n}"] if f"own_{n}" in own else next(rest) for n in self.names]
        return self.function(*arguments)


class Model(nn.Module):
    """A row between copies.

    Args:
        front, behind: whether its inputs, and its output, are copied.
        witness: return the copied float inputs too, as they are once the row has run.
    """

    def __init__(self, row: Row, *, front: bool, behind: bool, witness: bool) -> None:
        super().__init__()
        self.row = row
        self.front = Copies() if front else None
        self.behind = Copies() if behind else None
        self.witness = witness

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the row's output, and what else was asked for."""
        values = self.front(*inputs) if self.front is not None else inputs
        output = self.row(*values)
        if self.behind is not None:
            (output,) = self.behind(output)
        return (output, *(x for x in values if self.witness and x.is_floating_point()))


def surroundings(
    config: QuantizationConfig,
    fronts: Sequence[str],
    behinds: Sequence[str],
    targets: Iterable[str],
) -> list[RuleQuantizer]:
    """Return the quantizer of the copies around rows, none where it has nothing to do.

    The copies have the row's own specifications, so that no requantization stands between.

    Args:
        fronts, behinds: paths of the modules that copy.
    """
    spec = config.input_activation
    if config.mode != STATIC or spec is None or not (fronts or behinds):
        return []
    quantizer = RuleQuantizer(_Surroundings(targets))
    for path in fronts:
        quantizer.set_module_name(path, _activations(spec, config))
    for path in behinds:
        quantizer.set_module_name(path, _activations(config.output_activation or spec, config))
    return [quantizer]


def _activations(
    spec: QuantizationSpec | FixedQParamsQuantizationSpec, config: QuantizationConfig
) -> QuantizationConfig:
    return replace(
        config, input_activation=spec, output_activation=None, weight=None, balance=False
    )


class _Surroundings(Backend):
    """Copies of integers, for every target."""

    name = "contract"

    def __init__(self, targets: Iterable[str]) -> None:
        clone: Any = torch.ops.aten.clone.default
        self.rules = (
            Rule(
                name="copy",
                patterns=(OperatorPattern((clone,)),),
                activations=("self",),
                shares=True,
                kernels={target: Kernel("clone on integers", on_integers) for target in targets},
            ),
        )
