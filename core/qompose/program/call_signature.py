# SPDX-License-Identifier: Apache-2.0
"""How a graph module is called: its signature, and the code that fx generates for it.

How graphs are called: inputs are checked, and those of lowered ones go straight to their placeholders.

An exported graph flattens its arguments by their tree and builds its result by another, in Python, at
each call: about twenty microseconds, several times what a small kernel takes. Where every argument and
every result stands for itself there is no tree to walk; its code goes by the shortcuts that there are.

Shorter ways to the same, in the source that graphs are run by.

A module finds a tensor of its own by a failed look-up and a function in Python, half a microsecond each
time, and torch calls an operator by its overload through a reader of schemas, where the function of the same
name has its arguments compiled in. For a small kernel that is a third of its time.

How a GraphModule is called, recovered from its own graph: argument tree, shapes, dynamic dimensions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode, _format_target, _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from qompose.program.graph import pytree_info, value_of
from qompose.program.input_guards import InputChecks, as_linear, input_checks, require_input


class CheckedCalls(_PyTreeCodeGen):
    """Code that refuses inputs for which the program was not exported."""

    def __init__(self, pytree_info: _PyTreeInfo, checks: InputChecks) -> None:
        super().__init__(pytree_info)
        self.checks = checks

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [*super().additional_globals(), ("require_input", require_input)]

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        bindings = self.bindings(fn_args, free_vars, expanded_def)
        names = [name for name in _names(free_vars) if name != "self"]
        return "\n    ".join([bindings, *self.checks.lines(names)])

    def bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """Return code that gives each placeholder its value."""
        return super().gen_var_bindings(fn_args, free_vars, expanded_def)


class DirectCalls(CheckedCalls):
    """Code that walks no tree where there is none: flat arguments, and one result or a tuple of results."""

    def bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        if not _flat_arguments(self.pytree_info.in_spec):
            return super().bindings(fn_args, free_vars, expanded_def)
        placeholders = _names(free_vars)
        annotations = self._format_annotations(free_vars, expanded_def)
        return f"{annotations}\n    {', '.join(placeholders)}, = {', '.join(self.pytree_info.orig_args)},"

    def _gen_python_code(
        self, nodes: Any, root_module: str, *rest: Any, **options: Any
    ) -> PythonCode:
        code = super()._gen_python_code(nodes, root_module, *rest, **options)
        return shorten(code, nodes.graph, root_module)

    def generate_output(
        self,
        output_args: Any,
        *,
        descs: Sequence[str] | None = None,
        repr_fn: Callable[[object], str] | None = None,
    ) -> str:
        spec, show = self.pytree_info.out_spec, repr_fn or repr
        if descs is None and spec is not None and spec.is_leaf():
            return f"return {show(output_args[0])}"
        if descs is None and spec is not None and spec.type is tuple and _leaves(spec):
            return f"return {show(tuple(output_args))}"
        return super().generate_output(output_args, descs=descs, repr_fn=repr_fn)


def _names(free_vars: Sequence[str]) -> list[str]:
    return [variable.split(":")[0].split("#")[0].strip() for variable in free_vars]


def _leaves(spec: TreeSpec) -> bool:
    return all(child.is_leaf() for child in spec.children())


def _flat_arguments(spec: TreeSpec) -> bool:
    """Whether the arguments are tensors one by one, in order or by name."""
    two = spec.type is tuple and spec.num_children == 2
    return two and all(
        part.type is kind and _leaves(part)
        for part, kind in zip(spec.children(), (tuple, dict), strict=True)
    )


def check_calls(module: GraphModule) -> GraphModule:
    """Have a program's code check its inputs by the examples of its placeholders; return the program.

    The graph is not compiled anew: `GraphModule.recompile` is the caller's.
    """
    codegen = module.graph._codegen
    if type(codegen) is _PyTreeCodeGen and codegen.pytree_info.in_spec is not None:
        checks = input_checks(module.graph.find_nodes(op="placeholder"))
        module.graph.set_codegen(CheckedCalls(codegen.pytree_info, checks))
    return module


def call_directly(module: GraphModule) -> None:
    """Have a graph's code bind its arguments and return its results without their trees, where it may.

    A GraphModule is called through a function that adds a line of its code to errors, which their tracebacks
    have anyway, and takes a microsecond. Its class is its own, so that this goes without.
    """
    codegen = check_calls(module).graph._codegen
    if type(codegen) is CheckedCalls:
        module.graph.set_codegen(DirectCalls(codegen.pytree_info, codegen.checks))
    module.recompile()
    type(module).__call__ = nn.Module.__call__  # type: ignore[method-assign]


_ASSIGNMENT: Final = re.compile(r"\s*(\w+)(?: : [^=]*)? = ")


def shorten(code: PythonCode, graph: Graph, root: str) -> PythonCode:
    """Return the code of a graph with shorter ways to its tensors and operators, line by line the same.

    Args:
        root: what the code calls the module of the graph.
    """
    ways = {node.name: way for node in graph.nodes if (way := _way(node, graph, root))}
    lines = (_shortened(line, ways) for line in code.src.split("\n"))
    return replace(code, src="\n".join(lines))


def _shortened(line: str, ways: dict[str, tuple[str, str]]) -> str:
    """Return a line that gives a node its value, by the way of that node if it has one."""
    found = _ASSIGNMENT.match(line)
    if found is None or found[1] not in ways:
        return line
    long, short = ways[found[1]]
    start, rest = line[: found.end()], line[found.end() :]
    return start + short + rest[len(long) :] if rest.startswith(long) else line


def _way(node: Node, graph: Graph, root: str) -> tuple[str, str] | None:
    """Return what stands for a node's tensor or operator in its line, and what may stand there."""
    if node.op == "get_attr" and graph.owning_module is not None:
        place = _place(graph.owning_module, str(node.target), root)
        return None if place is None else (_format_target(root, str(node.target)), place)
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        name = _function(node.target)
        return None if name is None else (f"torch.ops.{node.target}(", f"torch.{name}(")
    return None


def _place(module: nn.Module, target: str, root: str) -> str | None:
    """Return where a module keeps a parameter or buffer, None where the target is none."""
    *path, last = target.split(".")
    source = root
    for name in path:
        inner = module._modules.get(name)
        if inner is None:
            return None
        module, source = inner, f"{source}._modules[{name!r}]"
    kept = (place for place in ("_buffers", "_parameters") if last in getattr(module, place))
    return next((f"{source}.{place}[{last!r}]" for place in kept), None)


@functools.cache
def _function(operator: OpOverload) -> str | None:
    """Return the name of torch's compiled function that calls this operator, and no other.

    That is one on a tensor that gives one tensor, with no other overload to choose from.
    """
    name = operator._opname
    function = getattr(torch._C._VariableFunctions, name, None)
    if operator.namespace != "aten" or function is None or getattr(torch, name, None) != function:
        return None
    schema = operator._schema
    first, results = (
        [str(a.type) for a in schema.arguments[:1]],
        [str(r.type) for r in schema.returns],
    )
    alone = _overloads(operator) == [operator]
    return name if alone and first == results == ["Tensor"] else None


def _overloads(operator: OpOverload) -> list[OpOverload]:
    """Return the overloads of an operator that neither write into a result nor know names of dimensions."""
    packet = operator.overloadpacket
    every = [getattr(packet, name) for name in packet.overloads()]
    return [
        one
        for one in every
        if not any(a.is_out or "Dimname" in str(a.type) for a in one._schema.arguments)
    ]


def call_signature(module: GraphModule) -> CallSignature:
    """Return example inputs of the recorded shapes, with zeros for data, and the dynamic dimensions.

    A dimension that is a linear function of another, `2 * batch + 1`, stays tied to it. One that is
    computed otherwise, or from two others, is left for export to find.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    dims: dict[str, Any] = {}
    leaves = [_example(node) for node in placeholders]
    shapes = [_dynamic_dims(node, dims) for node in placeholders]
    info = pytree_info(module.graph)
    if info is None or info.in_spec is None:
        return CallSignature(tuple(leaves), {}, tuple(shapes) if any(shapes) else None)
    args, kwargs = pytree.tree_unflatten(leaves, info.in_spec)
    if not any(shapes):
        return CallSignature(tuple(args), kwargs, None)
    shape_args, shape_kwargs = pytree.tree_unflatten(shapes, info.in_spec)
    named = dict(zip(info.orig_args, shape_args, strict=False))
    return CallSignature(tuple(args), kwargs, {**named, **shape_kwargs})


def _example(node: Node) -> Any:
    value = value_of(node)
    if isinstance(value, Tensor):
        return torch.zeros(
            [_hint(size) for size in value.shape], dtype=value.dtype, device=value.device
        )
    return _hint(value)


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _dynamic_dims(node: Node, dims: dict[str, Any]) -> Any:
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return Dim.DYNAMIC  # an input that is a number itself; torch takes no range for those
    if not isinstance(value, Tensor):
        return None
    sizes: list[Any] = list(value.shape)
    return {i: _dim(s, dims) for i, s in enumerate(sizes) if isinstance(s, torch.SymInt)} or None


def _dim(size: torch.SymInt, dims: dict[str, Any]) -> Any:
    """Return one Dim per symbol, with its range, and a derived one for a linear function of a symbol."""
    linear = as_linear(size.node.expr)
    if linear is None:
        return Dim.AUTO
    symbol, factor, offset = linear
    root = _root(symbol, size.node.shape_env, dims)
    scaled = root if factor == 1 else factor * root
    return scaled if offset == 0 else scaled + offset


def _root(symbol: Any, env: Any, dims: dict[str, Any]) -> Any:
    name = str(symbol)
    if name not in dims:
        bounds = env.bound_sympy(symbol)
        upper = int(bounds.upper) if bounds.upper.is_Integer else None
        dims[name] = Dim(name, min=int(bounds.lower) or None, max=upper)
    return dims[name]


@dataclass(frozen=True)
class CallSignature:
    """How a program is called: example inputs (of the right shapes; their values mean nothing), and
    which dimensions may vary, in the form that torch.export takes.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any
