# SPDX-License-Identifier: Apache-2.0
"""How a program is called: its arguments and results as trees, and the names that a file has for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from qompose_onnx.errors import ONNXInputError, ONNXTargetError


@dataclass(frozen=True)
class Leaf:
    """An argument or result: a tensor or number ("int", "float") by its name in the file; or a value."""

    name: str = ""
    dtype: str = ""
    rank: int = 0
    value: Any = None


@dataclass(frozen=True)
class Interface:
    """The leaves of arguments and results; their trees as text.

    Where a tree is "", or has a class that is not registered with torch's pytree in this process, arguments
    are taken flat, and results are a flat list.
    """

    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    takes: str = ""
    gives: str = ""

    def feeds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a call by their names in the file.

        Raises:
            ONNXInputError: an argument is missing, or is not what the program was exported with.
        """
        flat = self._flat(args, kwargs)
        if len(flat) != len(self.inputs):
            raise ONNXInputError(f"the program expects {len(self.inputs)} inputs, got {len(flat)}")
        found = {}
        for leaf, given in zip(self.inputs, flat, strict=True):
            if leaf.name:
                found[leaf.name] = _checked(leaf, given)
            elif type(given) is not type(leaf.value) or given != leaf.value:
                raise ONNXInputError(
                    f"an input must be {leaf.value!r}, the value the program was exported "
                    f"with, got {given!r}"
                )
        return found

    def _flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        spec = _tree(self.takes)
        if spec is None:
            return pytree.tree_leaves((args, dict(kwargs)))
        names = list(spec.children()[1].context)
        if set(names) != set(kwargs):
            wanted = ", ".join(names) or "none"
            raise ONNXInputError(
                f"the program takes keyword arguments: {wanted}; got: {', '.join(kwargs) or 'none'}"
            )
        flat, given = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
        if given != spec:
            expected = [leaf.name or repr(leaf.value) for leaf in self.inputs]
            raise ONNXInputError(
                f"the program expects {_drawn(expected, spec)}, got "
                f"{_drawn([type(leaf).__name__ for leaf in flat], given)}"
            )
        return flat

    def results(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return results in the tree that the exported module returns."""
        flat, spec = [_result(leaf, tensors) for leaf in self.outputs], _tree(self.gives)
        return flat if spec is None else pytree.tree_unflatten(flat, spec)

    def dumps(self) -> str:
        """Return the interface as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Interface:
        """Return what `dumps` wrote."""
        data = json.loads(text)
        for side in ("inputs", "outputs"):
            data[side] = tuple(Leaf(**leaf) for leaf in data[side])
        return cls(**data)


def _checked(leaf: Leaf, given: Any) -> Tensor:
    if type(given).__name__ == leaf.dtype:
        return torch.tensor(given)
    if isinstance(given, Tensor) and str(given.dtype) == leaf.dtype and given.dim() == leaf.rank:
        return given.detach()
    found = (
        f"a {given.dtype} tensor with {given.dim()} dimensions"
        if isinstance(given, Tensor)
        else repr(given)
    )
    raise ONNXInputError(
        f"input {leaf.name!r} must be {leaf.dtype} with {leaf.rank} dimensions, got {found}"
    )


def _result(leaf: Leaf, tensors: Mapping[str, Tensor]) -> Any:
    if not leaf.name:
        return leaf.value
    found = tensors[leaf.name]
    return found.item() if leaf.dtype in ("int", "float") else found


def interface_of(
    program: ExportedProgram, names: Sequence[str], results: Sequence[str]
) -> Interface:
    """Return the interface of a program, whose file has these names of inputs and outputs, in order."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs, outputs = program.graph_signature.input_specs, program.graph_signature.output_specs
    given = [spec.arg for spec in inputs if spec.kind.name == "USER_INPUT"]
    returned = [spec.arg for spec in outputs if spec.kind.name == "USER_OUTPUT"]
    return Interface(
        _leaves(given, names, values),
        _leaves(returned, results, values),
        _dumped(program.call_spec.in_spec),
        _dumped(program.call_spec.out_spec),
    )


def _leaves(
    arguments: Sequence[Any], names: Sequence[str], values: Mapping[str, Any]
) -> tuple[Leaf, ...]:
    left = iter(names)
    return tuple(
        Leaf(value=argument.value)
        if isinstance(argument, ConstantArgument)
        else _leaf(next(left), values.get(argument.name))
        for argument in arguments
    )


def _leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, Tensor):
        if value.dtype is torch.bfloat16:
            raise ONNXTargetError(
                f"{name} is bfloat16, which ONNX Runtime and OpenVINO cannot exchange with "
                "torch. Make the model accept and return float32, or lower it for the target "
                "'torch'"
            )
        return Leaf(name, str(value.dtype), value.dim())
    return Leaf(name, "float" if isinstance(value, (float, torch.SymFloat)) else "int")


def _drawn(leaves: list[str], spec: pytree.TreeSpec) -> str:
    """Return arguments in the form of a call, such as `((x, y), {mask: z})`."""
    return str(pytree.tree_unflatten(leaves, spec)).replace("'", "")


def _tree(text: str) -> pytree.TreeSpec | None:
    """Return a tree; None if it has a class that is not registered in this process."""
    try:
        return pytree.treespec_loads(text) if text else None
    except (NotImplementedError, KeyError):
        return None


def _dumped(spec: Any) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError):  # a class that is registered without a name for files
        return ""
