# SPDX-License-Identifier: Apache-2.0
"""The errors of the ``executorch`` target, which name operators and modules of the user's model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from qompose.backend import graphs_in
from qompose.errors import TargetError
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qompose_xnnpack.executorch_target.nodes import module_path


class MissingExecutorchError(TargetError, ImportError):
    """ExecuTorch, which the ``executorch`` target needs, cannot be imported."""

    def __init__(self, cause: ImportError) -> None:
        super().__init__(
            f"the executorch target requires executorch, which cannot be imported ({cause}). "
            'Install it with: pip install "qompose-xnnpack[executorch]"',
            name=cause.name,
        )


class ExecutorchTargetError(TargetError, RuntimeError):
    """The graph cannot become a program, or the runtime rejects the program."""


class ExecutorchInputError(ExecutorchTargetError, TypeError):
    """A method was called with inputs that it does not take; the message names the argument."""


REMEDY = (
    "Lower the model for the target 'torch' instead, or rewrite that part with operators "
    "that the runtime supports"
)
_MOST = 4
CONVOLUTIONS = frozenset(
    {
        torch.ops.aten.conv1d.default,
        torch.ops.aten.conv1d.padding,
        torch.ops.aten.conv_transpose1d.default,
    }
)
"""The convolutions that XNNPACK runs as those of images of one row."""


def lowering_error(
    error: Exception, methods: Mapping[str, ExportedProgram]
) -> ExecutorchTargetError:
    """Return the error for methods that ExecuTorch's passes reject; `error` is to be its cause."""
    said = str(error).strip()
    first = said.partition("\n")[0]
    moving = _in_methods(methods, _of_two_sizes) if _ONE_SIZE in said else []
    constants = _in_methods(methods, lambda exported: _constants(first, exported))
    operators = _in_methods(methods, lambda exported: _operators(first, exported))
    if moving:
        where = (
            f" because of {_first_of(moving)}: for a 1-D convolution XNNPACK supports only "
            "one size that is known at run time. Fix the batch size or the length"
        )
    elif constants:
        where = f" because of {_first_of(constants)}"
    elif operators:
        where = f": its runtime does not have the operator {_first_of(operators)}"
    else:
        where, first = "", said
    first = _whole(str(error)) if first == said else first
    return ExecutorchTargetError(
        f"ExecuTorch cannot lower this graph{where}. {REMEDY}. {type(error).__name__}: {first}"
    )


_ONE_SIZE = "only supports 1 dynamic dimension"


def _whole(said: str) -> str:
    """Return a message without a sentence that breaks off in the middle: ExecuTorch has some that do."""
    return re.sub(r"(?<=[.!?])\s[^.!?]* $", "", said).strip()


def _of_two_sizes(exported: ExportedProgram) -> list[str]:
    """Return the convolutions of one dimension that have several sizes known only at run time."""
    found = []
    for node in exported.graph.nodes:
        sizes = getattr(node.meta.get("val"), "shape", ())
        unknown = [size for size in sizes if isinstance(size, torch.SymInt)]
        if node.target in CONVOLUTIONS and len(unknown) > 1:
            found.append(_place(node, *_schema_name(node)))
    return found


def loading_error(error: Exception, suspects: Iterable[str]) -> ExecutorchTargetError:
    """Return the error for a program that the runtime rejects; `suspects` are operators that may be why."""
    found = _first_of(suspects)
    named = f" It contains operators that are not int8 kernels: {found}." if found else ""
    return ExecutorchTargetError(
        f"the ExecuTorch runtime cannot load this program ({error}). The reason is on the "
        f"standard error stream.{named} {REMEDY}"
    )


def _in_methods(
    methods: Mapping[str, ExportedProgram], find: Callable[[ExportedProgram], list[str]]
) -> list[str]:
    """Return what is found in methods, with the name of each where there are several."""
    found = {name: find(exported) for name, exported in methods.items()}
    one = len(methods) == 1
    return [
        place if one else f"{place} of method {name!r}"
        for name, places in found.items()
        for place in places
    ]


def _first_of(places: Iterable[str]) -> str:
    found = list(dict.fromkeys(places))
    rest = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + rest


def _constants(said: str, exported: ExportedProgram) -> list[str]:
    """Return the parameters and buffers that a message names."""
    signature = exported.graph_signature
    constants = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return [name for key, name in constants.items() if re.search(rf"\b{re.escape(key)}\b", said)]


def _operators(said: str, exported: ExportedProgram) -> list[str]:
    """Return the operators that a message names; those in bodies alone, if there are any.

    What XNNPACK takes outside, it leaves to the runtime in the bodies of conditions and loops.
    """
    root = exported.graph_module
    _, *bodies = graphs_in(root)
    inside = [place for body in bodies for place in _calls(said, body)]
    return inside or list(_calls(said, root))


def _calls(said: str, part: GraphModule) -> Iterator[str]:
    for node in part.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        space, name = _schema_name(node)
        # a decomposition may have put another form in its place: _embedding_bag_forward_only
        if re.search(rf"\b{space}(?:\.|::)_?{name}(?:_forward_only)?(?![A-Za-z0-9_])", said):
            yield _place(node, space, name)


def _schema_name(node: Node) -> tuple[str, str]:
    space, _, name = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    return space, name


def _place(node: Node, space: str, name: str) -> str:
    where = module_path(node)
    return f"{node.name} ({space}.{name}{f' in {where}' if where else ''})"
