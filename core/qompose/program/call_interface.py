# SPDX-License-Identifier: Apache-2.0
"""What the file of another runtime keeps of how a program is called.

Runtimes take and return flat tensors. The exported module's structures, keyword arguments, fixed values and
sizes are kept beside them, so that the program is called as the module is, and refuses what the module does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

_NUMBERS = ("int", "float")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSize:
    """A dimension from `low` to `high`, where None is no bound.

    Sizes of one `symbol` are equal; "" is a fixed one.
    """

    low: int
    high: int | None
    symbol: str = ""

    def __str__(self) -> str:
        if not self.symbol:
            return str(self.high)
        return f"{self.low} to {self.high}" if self.high is not None else f"at least {self.low}"

    def takes(self, size: int) -> bool:
        """Tell whether a dimension may have a size."""
        return self.low <= size and (self.high is None or size <= self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallArgument:
    """An argument or result: a tensor, a number that varies, or a value that export fixed.

    Attributes:
        name: what the exported program calls it.
        dtype: of a tensor, without "torch."; "int" or "float" for a number; "" for a fixed value.
        sizes: of a tensor.
        value: the fixed value.
    """

    name: str = ""
    dtype: str = ""
    sizes: tuple[CallSize, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        if not self.dtype:
            return repr(self.value)
        if self.is_number:
            return f"a Python {self.dtype}"
        return f"a tensor of dtype {self.dtype} and shape ({', '.join(map(str, self.sizes))})"

    @property
    def is_fixed(self) -> bool:
        """Whether export fixed its value."""
        return not self.dtype

    @property
    def is_number(self) -> bool:
        """Whether it is a Python number that varies."""
        return self.dtype in _NUMBERS

    def objection(self, given: Any) -> str:
        """Return what is given, in a few words, if it cannot be this argument; "" if it can."""
        if self.is_fixed:
            same = type(given) is type(self.value) and given == self.value
            return "" if same else f"{_shown(given)}; the program was exported with a fixed value"
        if self.is_number:
            return "" if type(given).__name__ == self.dtype else _shown(given)
        return "" if isinstance(given, Tensor) and self._takes(given) else _shown(given)

    def _takes(self, given: Tensor) -> bool:
        usual = given.device.type == "cpu" and given.layout is torch.strided
        fits = len(given.shape) == len(self.sizes) and all(
            size.takes(actual) for actual, size in zip(given.shape, self.sizes, strict=True)
        )
        return usual and fits and str(given.dtype) == f"torch.{self.dtype}"


@dataclass(frozen=True)
class CallInterface:
    """How another runtime's program is called: as the exported module is, with its structures and its sizes.

    Attributes:
        arguments, results: their leaves, in order.
        inputs, outputs: their trees. None where a class in one cannot be saved, or is not registered with
            torch's pytree in this process: arguments are then taken flat, and results are a flat list.
    """

    arguments: tuple[CallArgument, ...]
    results: tuple[CallArgument, ...] = ()
    inputs: pytree.TreeSpec | None = None
    outputs: pytree.TreeSpec | None = None

    @classmethod
    def of(cls, program: ExportedProgram) -> CallInterface:
        """Return the interface of an exported program."""
        signature = program.graph_signature
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}

        def leaf(spec: Any) -> CallArgument:
            if isinstance(spec, ConstantArgument):
                return CallArgument(name=spec.name, value=spec.value)
            return _argument(spec.name, values.get(spec.name), program.range_constraints)

        inputs = [s.arg for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
        outputs = [s.arg for s in signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
        return cls(
            tuple(map(leaf, inputs)),
            tuple(map(leaf, outputs)),
            program.call_spec.in_spec,
            program.call_spec.out_spec,
        )

    def flat(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        of: str = "the program",
        error: type[Exception] = TypeError,
    ) -> list[Any]:
        """Return the leaves of a call's arguments, in order; tensors are detached.

        Args:
            of: what is called, in messages.
            error: the class of errors, made from a message.

        Raises:
            error: the arguments have another structure, or one is not what the program was exported with.
        """
        leaves = self._leaves(args, kwargs, of, error)
        for argument, given in zip(self.arguments, leaves, strict=True):
            if problem := argument.objection(given):
                raise error(f"input {argument.name!r} of {of} must be {argument}, got {problem}")
        self._check_symbols(leaves, of, error)
        return [x.detach() if isinstance(x, Tensor) else x for x in leaves]

    def _leaves(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], of: str, error: type[Exception]
    ) -> list[Any]:
        names = ", ".join(argument.name for argument in self.arguments) or "no inputs"
        if self.inputs is None:
            leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
            if len(leaves) != len(self.arguments):
                raise error(f"{of} expects {names}, got {len(leaves)} inputs")
            return leaves
        known = self.inputs.child(1).context
        kwargs = {n: kwargs[n] for n in known} if set(known) == set(kwargs) else kwargs
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.inputs:
            raise error(
                f"{of} expects {names} with the structure {_drawn(self.inputs)}, got {_drawn(spec)}"
            )
        return leaves

    def _check_symbols(self, leaves: Sequence[Any], of: str, error: type[Exception]) -> None:
        seen: dict[str, tuple[int, str]] = {}
        for argument, leaf in zip(self.arguments, leaves, strict=True):
            for place, size in enumerate(argument.sizes):
                actual, name = leaf.shape[place], argument.name
                first, other = seen.setdefault(size.symbol, (actual, name))
                if size.symbol and actual != first:
                    raise error(
                        f"input {name!r} of {of} has size {actual} in dimension {place}, but must "
                        f"match size {first} of input {other!r}"
                    )

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return outputs in the structure that the exported module returns.

        Args:
            outputs: all leaves, or those alone that are not fixed.
        """
        leaves, fixed = [*outputs], [r for r in self.results if r.is_fixed]
        if fixed and len(leaves) == len(self.results) - len(fixed):
            given = iter(leaves)
            leaves = [r.value if r.is_fixed else next(given) for r in self.results]
        return leaves if self.outputs is None else pytree.tree_unflatten(leaves, self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the interface as JSON data."""
        return {
            "arguments": [asdict(argument) for argument in self.arguments],
            "results": [asdict(argument) for argument in self.results],
            "inputs": _dumped(self.inputs),
            "outputs": _dumped(self.outputs),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CallInterface:
        """Return what `to_dict` turned into data.

        Raises:
            KeyError, TypeError: the data are of something else.
        """
        return cls(
            tuple(map(_read_argument, data["arguments"])),
            tuple(map(_read_argument, data["results"])),
            _read_spec(data["inputs"]),
            _read_spec(data["outputs"]),
        )


def _argument(name: str, value: Any, ranges: Mapping[Any, Any]) -> CallArgument:
    if not isinstance(value, Tensor):
        is_float = isinstance(value, (float, torch.SymFloat))
        return CallArgument(name=name, dtype="float" if is_float else "int")
    sizes = tuple(_size(size, ranges) for size in value.shape)
    return CallArgument(name=name, dtype=str(value.dtype).removeprefix("torch."), sizes=sizes)


def _size(size: Any, ranges: Mapping[Any, Any]) -> CallSize:
    if isinstance(size, int):
        return CallSize(low=size, high=size)
    expression = size.node.expr
    bounds = {symbol: ranges.get(symbol) for symbol in expression.free_symbols}
    low, high = (_bound(expression, bounds, end) for end in ("lower", "upper"))
    # Export treats 0 and 1 specially and starts at 2 unless more was declared.
    return CallSize(low=0 if low is None or low <= 2 else low, high=high, symbol=str(expression))


def _bound(expression: Any, bounds: Mapping[Any, Any], end: str) -> int | None:
    """Return an expression at one end of its symbols' ranges; None where it has none."""
    if any(bound is None for bound in bounds.values()):
        return None
    found = expression.subs({symbol: getattr(bound, end) for symbol, bound in bounds.items()})
    return int(found) if found.is_Integer else None


def _shown(given: Any) -> str:
    """Return an input in a few words."""
    if not isinstance(given, Tensor):
        return f"{given!r}"[:60]
    dtype, device = str(given.dtype).removeprefix("torch."), given.device.type
    layout = "" if given.layout is torch.strided else f", {given.layout}"
    where = "" if device == "cpu" else f" on {device}"
    return f"a tensor of dtype {dtype} and shape {tuple(given.shape)}{where}{layout}"


def _drawn(spec: pytree.TreeSpec) -> str:
    """Return a tree in the form of a call: `(*, [*, *]), {'mask': *}`."""
    return str(pytree.tree_unflatten(["*"] * spec.num_leaves, spec)).replace("'*'", "*")


def _read_argument(data: Mapping[str, Any]) -> CallArgument:
    return CallArgument(**{**data, "sizes": tuple(CallSize(**size) for size in data["sizes"])})


def _dumped(spec: pytree.TreeSpec | None) -> str:
    try:
        return "" if spec is None else pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError):  # a class that is registered without a name for files
        return ""


def _read_spec(text: str) -> pytree.TreeSpec | None:
    try:
        return pytree.treespec_loads(text) if text else None
    except (NotImplementedError, KeyError):  # a class that is not registered in this process
        return None
