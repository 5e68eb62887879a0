# SPDX-License-Identifier: Apache-2.0
"""The interface of a method of a program: its arguments with their types and sizes, its tree of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

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
class Size:
    """A dimension from ``low`` to ``high``; those of one ``symbol`` are equal, and "" is a fixed one."""

    low: int
    high: int
    symbol: str = ""

    def __str__(self) -> str:
        return f"{self.low} to {self.high}" if self.symbol else str(self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An argument: a tensor of a ``dtype`` (without "torch.") and ``sizes``, or else a fixed ``value``.

    Numbers, strings and None are fixed when a program is exported.
    """

    name: str
    dtype: str = ""
    sizes: tuple[Size, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        return f"a {self.dtype} tensor of ({sizes})" if self.dtype else repr(self.value)

    def checked(self, given: Any, method: str) -> Any:
        """Return what the runtime takes for this argument.

        Raises:
            ExecutorchInputError: its value, type or size is wrong.
        """
        problem = self._problem(given)
        if problem:
            raise ExecutorchInputError(
                f"input {self.name!r} of {method!r} must be {self}, got {problem}"
            )
        return given.detach().contiguous() if isinstance(given, Tensor) else given

    def _problem(self, given: Any) -> str:
        described = _described(given)
        if not self.dtype:
            same = type(given) is type(self.value) and given == self.value
            return "" if same else f"{described}; the program was exported with a fixed value"
        if not isinstance(given, Tensor):
            return described
        fits = len(given.shape) == len(self.sizes) and all(
            size.low <= actual <= size.high
            for actual, size in zip(given.shape, self.sizes, strict=True)
        )
        usual = given.device.type == "cpu" and given.layout is torch.strided
        return "" if fits and usual and str(given.dtype) == f"torch.{self.dtype}" else described

    def largest(self) -> Any:
        """Return zeros of the largest size, or the value."""
        if not self.dtype:
            return self.value
        return torch.zeros([s.high for s in self.sizes], dtype=getattr(torch, self.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """How one method is called.

    ``inputs``, ``outputs``: trees of arguments and results; None where it was read from a file and has a
    class that this process does not know: arguments are then taken flat, and results are a flat list.
    ``largest_first``: whether it has to run with the largest sizes before any others.
    ``writes``: paths of the buffers that it writes to, which a later run and other methods read.
    """

    arguments: tuple[Argument, ...]
    inputs: pytree.TreeSpec | None
    outputs: pytree.TreeSpec | None
    largest_first: bool = False
    writes: tuple[str, ...] = ()

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str) -> list[Any]:
        """Return checked inputs in the runtime's order. Raises ``ExecutorchInputError``."""
        if self.inputs is None:
            leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
            if len(leaves) != len(self.arguments):
                raise ExecutorchInputError(
                    f"{method!r} expects {self._names()}, got {len(leaves)} inputs"
                )
        else:
            names = self.inputs.child(1).context
            kwargs = {n: kwargs[n] for n in names} if set(names) == set(kwargs) else kwargs
            leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
            if spec != self.inputs:
                raise ExecutorchInputError(
                    f"{method!r} expects {self._names()} with the structure "
                    f"{_drawn(self.inputs)}, got {_drawn(spec)}"
                )
        checked = [a.checked(x, method) for a, x in zip(self.arguments, leaves, strict=True)]
        self._check_symbols(checked, method)
        return checked

    def _names(self) -> str:
        return ", ".join(argument.name for argument in self.arguments) or "no inputs"

    def _check_symbols(self, leaves: Sequence[Any], method: str) -> None:
        seen: dict[str, tuple[int, str]] = {}
        for argument, leaf in zip(self.arguments, leaves, strict=True):
            for place, size in enumerate(argument.sizes):
                actual, name = leaf.shape[place], argument.name
                first, other = seen.setdefault(size.symbol, (actual, name))
                if size.symbol and actual != first:
                    raise ExecutorchInputError(
                        f"input {name!r} of {method!r} has size {actual} in dimension "
                        f"{place}, but must match size {first} of input {other!r}"
                    )

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return outputs in the structure that the exported program has."""
        if self.outputs is None:
            return list(outputs)
        return pytree.tree_unflatten(list(outputs), self.outputs)

    def notes(self, method: str) -> tuple[str, ...]:
        """Return what users of the method's file have to know."""
        if not self.largest_first:
            return ()
        sizes = ", ".join(f"{a.name} {tuple(s.high for s in a.sizes)}" for a in self.arguments)
        return (DYNAMIC_MEAN_NOTE.format(method=method, sizes=sizes),)

    def to_dict(self) -> dict[str, Any]:
        """Return the interface as JSON data."""
        return {
            "arguments": [
                {"name": a.name, "dtype": a.dtype, "value": a.value,
                 "sizes": [[s.low, s.high, s.symbol] for s in a.sizes]}
                for a in self.arguments
            ],
            "inputs": self.inputs and pytree.treespec_dumps(self.inputs),
            "outputs": self.outputs and pytree.treespec_dumps(self.outputs),
            "largest_first": self.largest_first,
            "writes": [*self.writes],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Interface:
        """Return what `to_dict` turned into data."""
        return cls(
            arguments=tuple(
                Argument(
                    **{
                        **a,
                        "sizes": tuple(
                            Size(low=low, high=high, symbol=s) for low, high, s in a["sizes"]
                        ),
                    }
                )
                for a in data["arguments"]
            ),
            inputs=_loaded(data["inputs"]),
            outputs=_loaded(data["outputs"]),
            largest_first=data["largest_first"],
            writes=tuple(data["writes"]),
        )


def check_inputs(exported: ExportedProgram) -> None:
    """Raise ``ExecutorchInputError`` for inputs that the runtime's Python binding does not take."""
    for spec in _inputs(exported):
        constant = isinstance(spec, torch.export.graph_signature.ConstantArgument)
        if isinstance(spec, torch.export.graph_signature.TensorArgument):
            continue
        if not constant or isinstance(spec.value, str):
            what = "a string" if constant else "a variable number"
            raise ExecutorchInputError(
                f"input {spec.name!r} is {what}, which the runtime's Python binding does not "
                "support. Build the value into the model, or make it a tensor"
            )


def interface_of(exported: ExportedProgram) -> Interface:
    """Return the interface of an exported program whose inputs have been checked."""
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    targets = {
        node.target
        for part in exported.graph_module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    }
    return Interface(
        arguments=tuple(_argument(spec, placeholders, exported) for spec in _inputs(exported)),
        inputs=exported.call_spec.in_spec,
        outputs=exported.call_spec.out_spec,
        largest_first=bool(exported.range_constraints) and not targets.isdisjoint(MEANS),
    )


def _inputs(exported: ExportedProgram) -> list[Any]:
    kind = torch.export.graph_signature.InputKind.USER_INPUT
    return [spec.arg for spec in exported.graph_signature.input_specs if spec.kind is kind]


def _argument(spec: Any, placeholders: Mapping[str, Any], exported: ExportedProgram) -> Argument:
    if isinstance(spec, torch.export.graph_signature.ConstantArgument):
        return Argument(name=spec.name, value=spec.value)
    value = placeholders[spec.name].meta["val"]
    return Argument(
        name=spec.name,
        dtype=str(value.dtype).removeprefix("torch."),
        sizes=tuple(_size(size, exported.range_constraints) for size in value.shape),
    )


def _size(size: Any, ranges: Mapping[Any, Any]) -> Size:
    if isinstance(size, int):
        return Size(low=size, high=size)
    expression = size.node.expr
    bounds = {s: ranges[s] for s in expression.free_symbols}
    low, high = (
        int(expression.subs({s: getattr(b, end) for s, b in bounds.items()}))
        for end in ("lower", "upper")
    )
    # Export treats 0 and 1 specially and starts at 2 unless more was declared.
    return Size(low=0 if low <= 2 else low, high=high, symbol=str(expression))


def _described(given: Any) -> str:
    """Describe an input in a few words."""
    if not isinstance(given, Tensor):
        return f"{given!r}"[:60]
    dtype, device = str(given.dtype).removeprefix("torch."), given.device.type
    layout = "" if given.layout is torch.strided else f", {given.layout}"
    where = "" if device == "cpu" else f" on {device}"
    return f"a {dtype} tensor of {tuple(given.shape)}{where}{layout}"


def _drawn(spec: pytree.TreeSpec) -> str:
    """Return a tree in the form of a call: `(*, [*, *]), {'mask': *}`."""
    return str(pytree.tree_unflatten(["*"] * spec.num_leaves, spec)).replace("'*'", "*")


def _loaded(text: str) -> pytree.TreeSpec | None:
    """Return a tree; None if it has a class that is not registered in this process."""
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, KeyError):
        return None
