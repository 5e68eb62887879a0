# SPDX-License-Identifier: Apache-2.0
"""The interface of a method of a program: its arguments with their types and sizes, its tree of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from qompose.backend import CallInterface, nodes_in
from torch import Tensor
from torch.export import ExportedProgram

from qompose_xnnpack.executorch_target.errors import ExecutorchInputError

DYNAMIC_MEAN_NOTE = (
    "the program has means and dynamic sizes. XNNPACK (executorch 1.5.1) allocates the "
    "workspace of an int8 mean in the first run and writes beyond it if a later run is "
    "larger. ExecutorchProgram runs {method!r} once with the largest sizes on loading; other "
    "runtimes must do the same: {sizes}"
)
MEANS = frozenset(
    {
        torch.ops.aten.mean.dim,
        torch.ops.aten.adaptive_avg_pool2d.default,
        torch.ops.aten.avg_pool2d.default,
    }
)
"""The operators that may become XNNPACK's mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """How one method is called.

    ``call``: its arguments and results.
    ``largest_first``: whether it has to run with the largest sizes before any others.
    ``writes``: paths of the buffers that it writes to, which a later run and other methods read.
    """

    call: CallInterface
    largest_first: bool = False
    writes: tuple[str, ...] = ()

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str) -> list[Any]:
        """Return checked inputs in the runtime's order. Raises ``ExecutorchInputError``."""
        leaves = self.call.flat(args, kwargs, of=repr(method), error=ExecutorchInputError)
        return [x.contiguous() if isinstance(x, Tensor) else x for x in leaves]

    def largest(self) -> list[Any]:
        """Return inputs: zeros of the largest sizes, and fixed values."""
        return [
            a.value
            if a.is_fixed
            else torch.zeros([s.high or 0 for s in a.sizes], dtype=getattr(torch, a.dtype))
            for a in self.call.arguments
        ]

    def notes(self, method: str) -> tuple[str, ...]:
        """Return what users of the method's file have to know."""
        if not self.largest_first:
            return ()
        arguments = self.call.arguments
        sizes = ", ".join(f"{a.name} {tuple(s.high for s in a.sizes)}" for a in arguments)
        return (DYNAMIC_MEAN_NOTE.format(method=method, sizes=sizes),)

    def to_dict(self) -> dict[str, Any]:
        """Return the interface as JSON data."""
        facts = {"largest_first": self.largest_first, "writes": [*self.writes]}
        return {"call": self.call.to_dict(), **facts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Interface:
        """Return what `to_dict` turned into data."""
        return cls(
            call=CallInterface.from_dict(data["call"]),
            largest_first=data["largest_first"],
            writes=tuple(data["writes"]),
        )


def check_inputs(exported: ExportedProgram) -> None:
    """Raise ``ExecutorchInputError`` for inputs that the runtime's Python binding does not take."""
    for argument in CallInterface.of(exported).arguments:
        if argument.is_number:
            raise ExecutorchInputError(
                f"input {argument.name!r} is a dynamic scalar, which the runtime's Python binding "
                "does not support. Make it a tensor, or export it as a constant"
            )
        if isinstance(argument.value, str):
            raise ExecutorchInputError(
                f"input {argument.name!r} is a string, which the runtime's Python binding does not "
                "support. Build the value into the model"
            )


def interface_of(exported: ExportedProgram) -> Interface:
    """Return the interface of an exported program whose inputs have been checked."""
    targets = {node.target for node in nodes_in(exported.graph_module)}
    largest_first = bool(exported.range_constraints) and not targets.isdisjoint(MEANS)
    return Interface(call=CallInterface.of(exported), largest_first=largest_first)
