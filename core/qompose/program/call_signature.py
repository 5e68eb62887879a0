# SPDX-License-Identifier: Apache-2.0
"""How a program is called: the inputs for which it was exported, which its graph records.

`torch.export` writes sizes into a program: a mean over 16 rows is a sum divided by 16. The module that
torch makes of the program refuses other sizes; a graph that was rewritten must do so itself, or it would
compute something else without a word.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule, Node, Proxy
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from qompose.errors import InputError
from qompose.program.graph import pytree_info, value_of


@dataclass(frozen=True)
class CallSignature:
    """How a program is called: example inputs (of the right shapes; their values mean nothing), and
    which dimensions may vary, in the form that torch.export takes.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any


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


class CheckedCalls(_PyTreeCodeGen):
    """Code that refuses inputs for which the program was not exported."""

    def __init__(self, pytree_info: _PyTreeInfo, checks: InputChecks) -> None:
        super().__init__(pytree_info)
        self.checks = checks

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [
            *super().additional_globals(),
            ("Mapping", Mapping),
            ("require_input", require_input),
            ("require_dtype", require_dtype),
            ("require_nest", require_nest),
        ]

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        bindings = super().gen_var_bindings(fn_args, free_vars, expanded_def)
        names = [variable.split(":")[0].split("#")[0].strip() for variable in free_vars]
        annotations, _, flattening = bindings.rpartition("\n    ")
        specs = [spec for _, spec in _arguments(self.pytree_info)]
        if specs and all(spec.is_leaf() for spec in specs):
            # torch's flattening takes longer than all else in the call of a small model.
            flattening = f"{', '.join(names)}, = {', '.join(self.pytree_info.orig_args)},"
        checks = self.checks.lines([n for n in names if n != "self"])
        lines = [annotations, *_nests(self.pytree_info), flattening, *checks]
        return "\n    ".join(lines)


def _nests(info: _PyTreeInfo) -> Iterator[str]:
    """Yield Python statements that check how arguments are nested: torch's code skips what is too much."""
    for name, (where, spec) in zip(info.orig_args, _arguments(info), strict=False):
        yield from _nest(name, where, spec)


def _arguments(info: _PyTreeInfo) -> list[tuple[str, pytree.TreeSpec]]:
    """Return the Python expression of each argument's structure, and the structure."""
    spec = info.in_spec
    with_keywords = spec.type is tuple and spec.num_children == 2 and spec.child(1).type is dict
    return [
        (f"self._in_spec.child({part}).child({place})", spec)
        for part, arguments in enumerate(spec.children() if with_keywords else ())
        for place, spec in enumerate(arguments.children())
    ]


def _nest(name: str, where: str, spec: pytree.TreeSpec) -> Iterator[str]:
    """Yield statements for one argument, or a part of it, by the Python of its value and of its structure."""
    if spec.is_leaf():
        return
    count = spec.num_children
    if spec.type in (list, tuple, namedtuple):
        parts: Sequence[Any] = range(count)
        holds = f"isinstance({name}, (list, tuple)) and len({name}) == {count}"
        wanted = f"a list or tuple of {count}"
    elif spec.type is dict and all(type(key) in (str, int) for key in spec.context):
        parts = spec.context
        keys = [f"{key!r} in {name}" for key in parts]
        holds = " and ".join([f"isinstance({name}, Mapping)", f"len({name}) == {count}", *keys])
        wanted = f"a dict of {', '.join(map(repr, parts)) or 'nothing'}"
    else:
        parts, holds = (), f"pytree.tree_structure({name}) == {where}"
        wanted = f"a {spec.type.__name__} as in the example inputs"
    yield f"require_nest({holds}, {name}, {name!r}, {wanted!r})"
    for place, part in enumerate(parts):
        yield from _nest(f"{name}[{part!r}]", f"{where}.child({place})", spec.child(place))


def check_calls(module: GraphModule) -> GraphModule:
    """Have a program's code check its inputs by the examples of its placeholders; return the program.

    The graph is not compiled anew: `GraphModule.recompile` is the caller's.
    """
    codegen = module.graph._codegen
    if type(codegen) is _PyTreeCodeGen and codegen.pytree_info.in_spec is not None:
        checks = input_checks(module.graph.find_nodes(op="placeholder"))
        module.graph.set_codegen(CheckedCalls(codegen.pytree_info, checks))
    return module


def check_dtypes(module: GraphModule) -> None:
    """Have a program's code check the types of its inputs too, once it is compiled anew."""
    codegen = module.graph._codegen
    if isinstance(codegen, CheckedCalls):
        dtypes = dtypes_of(module.graph.find_nodes(op="placeholder"))
        checks = replace(codegen.checks, dtypes=dtypes)
        module.graph.set_codegen(CheckedCalls(codegen.pytree_info, checks))


def dtypes_of(placeholders: Sequence[Node]) -> dict[int, torch.dtype]:
    """Return the type of each input that is a dense tensor, by the examples of the placeholders."""
    values = {place: value_of(n) for place, n in enumerate(placeholders) if "val" in n.meta}
    tensors = ((place, value) for place, value in values.items() if isinstance(value, Tensor))
    return {place: value.dtype for place, value in tensors if value.layout is torch.strided}


Tree = Any
"""A whole number, ["size", input, dimension], ["value", input], or [operator, *trees]."""
_OPERATORS = {
    "Add": " + ",
    "Mul": " * ",
    "FloorDiv": " // ",
    "Mod": " % ",
    "PythonMod": " % ",
    "Equality": " == ",
    "Unequality": " != ",
    "StrictLessThan": " < ",
    "LessThan": " <= ",
    "StrictGreaterThan": " > ",
    "GreaterThan": " >= ",
}
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class InputChecks:
    """What is checked of each call of a program.

    Attributes:
        shapes: of each input that is a tensor, its sizes, None for one that may vary.
        constants: each input that is a number, a text or None, by its place: it was compiled in.
        conditions: between sizes that vary.
        dtypes: of each input that is a tensor, its type. None for programs in float, which may be trained
            under autocast or converted to another type.
    """

    shapes: Mapping[int, tuple[int | None, ...]]
    constants: Mapping[int, Any]
    conditions: tuple[Tree, ...] = ()
    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)

    def lines(self, names: Sequence[str]) -> Iterator[str]:
        """Yield Python statements that check the inputs of these names."""
        for place, dtype in self.dtypes.items():
            name = names[place]
            same = f"getattr({name}, 'dtype', None) is {dtype} and {name}.layout is torch.strided"
            yield f"require_dtype({same}, {name}, {name!r}, {dtype})"
        for place, sizes in self.shapes.items():
            wanted = ", ".join("any" if size is None else str(size) for size in sizes)
            for condition in _on_sizes(names[place], sizes):
                yield _statement(condition, names[place], f"[{wanted}]")
        for place, value in self.constants.items():
            yield _statement(_on_constant(names[place], value), names[place], repr(value))
        for tree in self.conditions:
            (first, *_) = _inputs(tree)
            condition = source(tree, names)
            yield _statement(condition, names[first], condition[1:-1])


def _statement(condition: str, name: str, wanted: str) -> str:
    return f"require_input({condition}, {name}, {name!r}, {wanted!r})"


def _on_sizes(name: str, sizes: Sequence[int | None]) -> Iterator[str]:
    """Yield conditions on the sizes that are fixed, and on how many there are.

    Slices, because they raise no error where a tensor has too few dimensions.
    """
    if None not in sizes:
        yield f"{name}.shape == {tuple(sizes)!r}"
        return
    start = len(sizes)
    while start and sizes[start - 1] is not None:
        start -= 1
    tail = tuple(sizes[start:])
    yield f"{name}.shape[{start}:] == {tail!r}" if tail else f"{name}.dim() == {len(sizes)}"
    for place, size in enumerate(sizes[:start]):
        if size is not None:
            yield f"{name}.shape[{place}:{place + 1}] == ({size},)"


def _on_constant(name: str, value: Any) -> str:
    if value is None:
        return f"{name} is None"
    if isinstance(value, float) and not math.isfinite(value):
        return f"repr({name}) == {str(value)!r}"
    return f"{name} == {value!r}"


def source(tree: Tree, names: Sequence[str]) -> str:
    """Return a condition as Python, with these names for the inputs."""
    if isinstance(tree, int):
        return str(tree)
    kind, *parts = tree
    if kind == "size":
        return f"{names[parts[0]]}.shape[{parts[1]}]"
    if kind == "value":
        return str(names[parts[0]])
    return "(" + _OPERATORS[kind].join(source(part, names) for part in parts) + ")"


def read_tree(data: Any, inputs: int) -> Tree:
    """Return a condition out of a file, which becomes source, if it is one over so many inputs.

    Raises:
        ValueError: it is not one.
    """
    if type(data) is int:
        return data
    if isinstance(data, list) and data:
        kind, *parts = data
        of_input = {"size": 2, "value": 1}.get(kind) == len(parts)
        natural = all(type(part) is int and part >= 0 for part in parts)
        if of_input and natural and parts[0] in range(inputs):
            return data
        if parts and kind in _OPERATORS:
            return [kind, *(read_tree(part, inputs) for part in parts)]
    raise ValueError(f"expected a condition on {inputs} inputs, got {data!r}")


def _inputs(tree: Tree) -> Iterator[int]:
    if isinstance(tree, list):
        kind, *parts = tree
        if kind in ("size", "value"):
            yield parts[0]
        else:
            for part in parts:
                yield from _inputs(part)


def require_input(holds: Any, value: object, name: str, wanted: str) -> None:
    """Raise an error where a condition on an input does not hold.

    Called by the code of programs, many times a second: what holds costs a comparison. Symbolic tracing,
    which knows no sizes, passes.

    Raises:
        InputError: it does not hold.
    """
    if holds is True or isinstance(value, Proxy) or isinstance(holds, Proxy):
        return
    # A tensor where there was to be a number was compared element by element.
    if isinstance(holds, Tensor) or not holds:
        raise InputError(name, _described(value), wanted)


def require_dtype(holds: bool, value: object, name: str, dtype: torch.dtype) -> None:
    """Raise an error where an input is not a dense tensor of a type; otherwise as `require_input`.

    Raises:
        InputError: it is not.
    """
    if holds or isinstance(value, Proxy):
        return
    given = f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    remedy = f"Pass torch.as_tensor({name}, dtype={dtype})"
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        given, remedy = f"a {value.layout} tensor", f"Pass {name}.to_dense()"
    raise InputError(name, given, f"a {dtype} tensor", remedy)


def require_nest(holds: bool, value: object, name: str, wanted: str) -> None:
    """Raise an error where an argument is nested otherwise; else as `require_input`.

    Raises:
        InputError: it is.
    """
    if holds or isinstance(value, Proxy):
        return
    given = _described(value)
    if isinstance(value, (list, tuple)):
        given = f"a {type(value).__name__} of {len(value)}"
    elif isinstance(value, Mapping):
        given = f"a {type(value).__name__} of {', '.join(map(repr, value)) or 'nothing'}"
    raise InputError(name, given, wanted, "Nest it as the example inputs are")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value)


def input_checks(placeholders: Sequence[Node]) -> InputChecks:
    """Return what a program was exported for, by the examples of its placeholders.

    Like torch, it lets a dimension be 0 or 1 that was said to be 2 at least: export says so of each one.
    What export assumed by functions that Python has no operator for is left to the operators themselves.
    """
    values = {place: value_of(n) for place, n in enumerate(placeholders) if "val" in n.meta}
    shapes, constants = {}, {}
    varying: list[tuple[Tree, torch.SymInt]] = []
    for place, value in values.items():
        if isinstance(value, Tensor):
            shapes[place] = tuple(s if isinstance(s, int) else None for s in value.shape)
            sizes: list[Any] = list(value.shape)
            varying += [(["size", place, d], s) for d, s in enumerate(sizes) if type(s) is not int]
        elif isinstance(value, torch.SymInt):
            varying.append((["value", place], value))
        elif isinstance(value, _PLAIN):
            constants[place] = value
    return InputChecks(shapes, constants, tuple(_conditions(varying)))


def _conditions(varying: Sequence[tuple[Tree, torch.SymInt]]) -> list[Tree]:
    """Return which sizes are equal or computed from others, their bounds, and what export assumed."""
    environments = {id(size.node.shape_env): size.node.shape_env for _, size in varying}
    known = _symbols(varying)
    found = []
    for tree, size in varying:
        expected = _as_tree(size.node.expr, known)
        if expected is not None and expected != tree:
            found.append(["Equality", tree, expected])
    for environment in environments.values():
        for symbol, tree in known.items():
            found += _bounds(tree, environment.var_to_range.get(symbol))
        guards = (
            _as_tree(g.expr, known) for g in environment.guards if not _of_zero_or_one(g.expr)
        )
        found += [guard for guard in guards if guard is not None]
    return [tree for place, tree in enumerate(found) if tree not in found[:place]]


def _symbols(varying: Sequence[tuple[Tree, torch.SymInt]]) -> dict[Any, Tree]:
    """Return what each symbol is, by the first size that is the symbol, or else is linear in it."""
    known: dict[Any, Tree] = {}
    for plain in (True, False):
        for tree, size in varying:
            found = as_linear(size.node.expr)
            if found is None or found[0] in known or plain is not (found[1:] == (1, 0)):
                continue
            symbol, factor, offset = found
            shifted = ["Add", tree, -offset] if offset else tree
            known[symbol] = shifted if factor == 1 else ["FloorDiv", shifted, factor]
    return known


def as_linear(expression: Any) -> tuple[Any, int, int] | None:
    """Return (symbol, factor, offset) of `factor * symbol + offset`, None for anything else.

    torch derives dimensions by whole numbers, and only growing ones.
    """
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    polynomial = expression.as_poly(symbol)
    if polynomial is None or polynomial.degree() != 1:
        return None
    factor, offset = polynomial.all_coeffs()
    if not (factor.is_Integer and factor.is_positive and offset.is_Integer):
        return None
    return symbol, int(factor), int(offset)


def _bounds(tree: Tree, bounds: Any) -> Iterator[Tree]:
    if bounds is None:
        return
    if bounds.lower.is_Integer and bounds.lower > 2:
        yield ["GreaterThan", tree, int(bounds.lower)]
    if bounds.upper.is_Integer:
        yield ["LessThan", tree, int(bounds.upper)]


def _as_tree(expression: Any, known: Mapping[Any, Tree]) -> Tree | None:
    """Return an expression as a tree, if it is made of sizes of inputs and of Python's operators."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return known.get(expression)
    parts = [_as_tree(argument, known) for argument in expression.args]
    name = type(expression).__name__
    return [name, *parts] if name in _OPERATORS and None not in parts else None


def _of_zero_or_one(expression: Any) -> bool:
    """Whether a guard says no more than that something is not 0 or 1, as export assumes of every size."""
    if isinstance(expression, sympy.Ne):
        return bool(expression.rhs in (0, 1))
    return isinstance(expression, sympy.Ge) and bool(expression.rhs in (1, 2))
