# SPDX-License-Identifier: Apache-2.0
"""A converted program as JSON: its graph with the record of how it was quantized.

Not torch's serializer, for three reasons. It stores exported programs, so a converted graph would have to
be traced again, which renames nodes and paths. It reads shapes with `eval`, guards with `exec`, and any
attribute of `torch` as an operator, so a file could run code. And `torch.export.load` unpickles. Here a
file can name registered operators and the functions listed below, and nothing else.

Of the record, all is stored that `report` and `lower` read, without live objects. Callables of
specifications (observer factories, functions that derive parameters) have done their work when a model is
converted. They are stored by name; what comes back has that name, and raises when called.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch._higher_order_ops  # registers the operators that take graphs
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeInfo

from qompose.errors import ConfigError, UserError
from qompose.json_codec import (
    DTYPE,
    QSCHEME,
    TEXT,
    Codec,
    codecs_of,
    of_type,
    plain,
    read_fields,
    write_fields,
)
from qompose.observers.config import ALGORITHM
from qompose.plan.plan import Record
from qompose.program.call_signature import CheckedCalls, dtypes_of, input_checks, read_tree
from qompose.program.graph import get_attribute, pytree_info
from qompose.program.meta import CUSTOM_KEY
from qompose.spec import qdq as _registers  # noqa: F401 - registers the operators
from qompose.spec.algorithm_choice import AlgorithmChoice, SmoothQuant, word_of
from qompose.spec.claim import Point
from qompose.spec.quantization_spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
    factory_name,
)
from qompose.storage.json_values import (
    NotStorable,
    Symbolic,
    SymbolReader,
    SymbolWriter,
    decode,
    decode_tree,
    encode,
    encode_tree,
)

# Functions that take numbers, as exported programs call them on sizes.
_OPERATOR = (
    "getitem add sub mul floordiv truediv mod pow neg pos eq ne lt le gt ge and_ or_ not_ lshift "
    "rshift"
)
_TORCH = "sym_int sym_float sym_max sym_min sym_not sym_ite sym_sum sym_sqrt"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATOR.split()},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in _TORCH.split()},
}
_NAME_OF = {function: name for name, function in _FUNCTIONS.items()}
# Operators that take graphs, all of which run nothing but those graphs.
_HIGHER_ORDER = (
    *("cond", "while_loop", "scan", "map_impl", "associative_scan", "invoke_subgraph"),
    *("strict_mode", "wrap_with_set_grad_enabled", "wrap_with_autocast"),
)
_REFUSED_NAMESPACES = frozenset({"debugprims"})
_OF_FILES = re.compile(r"file|path|dir|folder|url", re.IGNORECASE)
"""Names of texts that say where to read from or write to."""
_PART = re.compile(r"[A-Za-z_]\w*")


class UnknownOperator(LookupError):  # noqa: N818 - it says what the operator is
    """A stored operator is not registered in this process."""


class ProgramWriter:
    """Turns GraphModules into data. `tensors` collects what they hold, `operators` what they call."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.operators: set[str] = set()
        self.stacks: dict[str, int] = {}
        self._symbols = SymbolWriter()

    def program(self, module: GraphModule) -> dict[str, Any]:
        """Return a whole program as data.

        Raises:
            NotStorable: it holds or calls what cannot be stored; the message names the node.
        """
        graph = self._graph(module, "")
        return {
            "graph": graph,
            "symbols": self._symbols.symbols,
            "stacks": list(map(json.loads, self.stacks)),
        }

    def _graph(self, module: GraphModule, prefix: str) -> dict[str, Any]:
        inner: dict[str, Any] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr" and node.target not in inner:
                self._attribute(module, str(node.target), prefix, inner)
        return {
            "training": module.training,
            "nodes": [self._node(node) for node in module.graph.nodes],
            "call": _encode_call(module.graph),
            "inner": inner,
        }

    def _attribute(
        self, module: GraphModule, target: str, prefix: str, inner: dict[str, Any]
    ) -> None:
        try:
            value = get_attribute(module, _quotable(target))
        except ValueError as reason:
            raise NotStorable(
                f"a parameter or buffer whose name is not supported: {reason}"
            ) from None
        if isinstance(value, GraphModule):
            inner[target] = self._graph(value, f"{prefix}{target}.")
        elif isinstance(value, Tensor):
            self.tensors[f"{prefix}{target}"] = value
        else:
            raise NotStorable(
                f"{prefix}{target}, a {type(value).__module__}.{type(value).__name__}"
            )

    def _node(self, node: Node) -> dict[str, Any]:
        try:
            data: dict[str, Any] = {
                "op": node.op,
                "name": node.name,
                "target": _encode_target(node),
                "args": encode(node.args, _encode_node),
                "kwargs": encode(dict(node.kwargs), _encode_node),
            }
            if "val" in node.meta:
                data["example"] = encode(node.meta["val"], self._encode_example)
        except NotStorable as reason:
            raise NotStorable(f"{reason} (at {node.name}, {node.target})") from None
        if node.op == "call_function":
            self.operators.add(data["target"])
        if node.meta.get("nn_module_stack"):
            data["stack"] = self._stack(node.meta["nn_module_stack"])
        facts = (node.meta.get("custom") or {}).get(CUSTOM_KEY)
        if facts:
            data["facts"] = encode(facts)
        return data

    def _encode_example(self, value: Any) -> Any:
        if isinstance(value, Symbolic):
            return {"symbolic": self._symbols.encode(value)}
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise NotStorable(f"an example value of kind {getattr(value, 'layout', type(value))}")
        parts = (value.dtype, value.device, list(value.shape), list(value.stride()))
        encoded = [encode(part, self._encode_example) for part in parts]
        return {"tensor": [*encoded, value.requires_grad]}

    def _stack(self, stack: Mapping[str, Any]) -> int:
        """Return the number of a stack of modules in the table: many nodes have the same."""
        rows = [
            [key, path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"]
            for key, (path, kind) in stack.items()
        ]
        return self.stacks.setdefault(json.dumps(rows), len(self.stacks))


def _encode_node(value: Any) -> Any:
    if isinstance(value, Node):
        return {"node": value.name}
    raise NotStorable(f"an argument of type {type(value).__module__}.{type(value).__qualname__}")


def _encode_target(node: Node) -> str:
    target = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return str(target)
    if isinstance(target, torch._ops.OpOverload):
        if _names_a_file(target):
            raise NotStorable(f"a call to {target}, which takes a file name")
        return f"{target.namespace}::{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator) and target._name in _HIGHER_ORDER:
        return f"higher_order::{target._name}"
    name = None if isinstance(target, str) else _NAME_OF.get(target)
    if node.op != "call_function" or name is None:
        raise NotStorable(f"the {node.op} of {target}")
    return name


def decode_target(name: str) -> Callable[..., Any]:
    """Return what a file calls by this name: a registered operator, or a function of numbers.

    Raises:
        UnknownOperator: a file may not call it, or nobody registered it in this process.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition("::")
    if namespace == "higher_order":
        if rest not in _HIGHER_ORDER:
            raise UnknownOperator(f"the operator {name} is not allowed in a file")
        found: Any = getattr(torch.ops.higher_order, rest)
        return found  # type: ignore[no-any-return]
    operation, _, overload = rest.rpartition(".")
    if namespace in _REFUSED_NAMESPACES or not all(
        _PART.fullmatch(part) for part in (namespace, operation, overload)
    ):
        raise UnknownOperator(f"the operator {name} is not allowed in a file")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    except AttributeError:
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise UnknownOperator(f"the operator {name} is not registered; import its package first")
    if _names_a_file(found):
        raise UnknownOperator(f"the operator {name} is not allowed in a file")
    return found


def _names_a_file(operator: torch._ops.OpOverload) -> bool:
    """Tell whether an operator takes a text that, by its name, is one of a file."""
    arguments = operator._schema.arguments
    return any("str" in str(a.type) and _OF_FILES.search(a.name) for a in arguments)


def _encode_call(graph: Graph) -> dict[str, Any] | None:
    codegen = graph._codegen
    if type(codegen) is CodeGen:
        return None
    if not isinstance(codegen, CheckedCalls):
        raise NotStorable(f"a graph with the code generator {type(codegen).__name__}")
    names, in_spec, out_spec = codegen.pytree_info
    return {
        "names": list(names),
        "inputs": encode_tree(in_spec),
        "outputs": None if out_spec is None else encode_tree(out_spec),
        "conditions": list(codegen.checks.conditions),
    }


def _decode_call(data: Mapping[str, Any] | None, placeholders: Sequence[Node]) -> CodeGen:
    """Return what generates the signature. Names become Python source, so they must be names."""
    if data is None:
        return CodeGen()
    inputs = decode_tree(data["inputs"])
    outputs = None if data["outputs"] is None else decode_tree(data["outputs"])
    keywords: list[Any] = []
    if inputs.type is tuple and inputs.num_children == 2 and inputs.child(1).type is dict:
        keywords = inputs.child(1).context
    for name in data["names"]:
        _identifier(name)
    for name in keywords:
        _quotable(name)
    # Not what export assumed of these examples: reading them may have added to that.
    conditions = tuple(read_tree(tree, len(placeholders)) for tree in data["conditions"])
    dtypes = dtypes_of(placeholders)
    checks = replace(input_checks(placeholders), conditions=conditions, dtypes=dtypes)
    return CheckedCalls(_PyTreeInfo(list(data["names"]), inputs, outputs), checks)


def _identifier(name: object) -> str:
    """Return `name`, which goes into generated source, if it can do no more there than name something.

    Raises:
        ValueError: it is not an identifier.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"invalid value name {name!r}")
    return name


class ProgramReader:
    """Makes GraphModules of data and of the tensors that they hold, by path."""

    def __init__(self, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._data, self._tensors = data, tensors
        self._stacks = [{key: (path, kind) for key, path, kind in rows} for rows in data["stacks"]]
        self._symbols = SymbolReader(data["symbols"])
        self._mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=self._symbols.env, allow_fallback_kernels=False
        )
        self._examples = {"symbolic": self._symbols.decode, "tensor": self._example}

    def program(self) -> GraphModule:
        """Return the program.

        Raises:
            UnknownOperator: it calls an operator that nobody registered in this process.
            ValueError, TypeError, LookupError, RuntimeError, AttributeError: the data is malformed.
        """
        return self._graph(self._data["graph"], "")

    def _graph(self, data: Mapping[str, Any], prefix: str) -> GraphModule:
        root, graph = nn.Module(), Graph()
        nodes: dict[str, Node] = {}
        for facts in data["nodes"]:
            if facts["op"] == "get_attr":
                self._place(root, str(facts["target"]), prefix, data["inner"])
            node = self._node(graph, facts, nodes)
            nodes[node.name] = node
        graph.lint()
        graph.set_codegen(_decode_call(data["call"], graph.find_nodes(op="placeholder")))
        _check_arguments(graph)
        module = GraphModule(root, graph)
        return module.train(bool(data["training"]))

    def _place(self, root: nn.Module, target: str, prefix: str, inner: Mapping[str, Any]) -> None:
        """Put a tensor or an inner graph at its path, where the graph will look for it."""
        *path, last = _quotable(target).split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if last in owner._parameters or last in owner._buffers or last in owner._modules:
            return
        if target in inner:
            owner.add_module(last, self._graph(inner[target], f"{prefix}{target}."))
            return
        value = self._tensors[f"{prefix}{target}"]
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value)

    def _node(self, graph: Graph, facts: Mapping[str, Any], nodes: Mapping[str, Node]) -> Node:
        op, name, target = facts["op"], _identifier(facts["name"]), facts["target"]
        if op not in ("placeholder", "get_attr", "call_function", "output") or name in nodes:
            raise ValueError(f"{name!r} is not a node")
        others = {"node": nodes.__getitem__}
        args, kwargs = decode(facts["args"], others), decode(facts["kwargs"], others)
        if op == "placeholder":
            _identifier(str(target).removeprefix("**").removeprefix("*"))
        if op == "call_function":
            target = decode_target(target)
        for key in kwargs:
            _identifier(key)
        node = graph.create_node(op, target, args, kwargs, name)
        # Claims know nodes by name, and fx may have found another one better.
        node.name = name
        if "example" in facts:
            node.meta["val"] = decode(facts["example"], self._examples)
        if "stack" in facts:
            node.meta["nn_module_stack"] = dict(self._stacks[facts["stack"]])
        if "facts" in facts:
            custom = decode(facts["facts"])
            if not isinstance(custom, dict) or not all(isinstance(key, str) for key in custom):
                raise ValueError(f"the metadata of {name} must be a dict with string keys")
            node.meta["custom"] = {CUSTOM_KEY: custom}
        return node

    def _example(self, data: Any) -> Tensor:
        dtype, device, shape, stride = (decode(part, self._examples) for part in data[:4])
        with self._mode:
            return torch.empty_strided(
                shape, stride, dtype=dtype, device=device, requires_grad=bool(data[4])
            )


def _check_arguments(graph: Graph) -> None:
    """Check that a graph takes as many values as its arguments have leaves, and returns as many as needed."""
    info = pytree_info(graph)
    if info is None:
        return
    taken = sum(node.op == "placeholder" for node in graph.nodes)
    given = graph.output_node().args[0]
    returned = len(given) if isinstance(given, (list, tuple)) else 1
    specs = ((info.in_spec, taken), (info.out_spec, returned))
    if any(spec is not None and spec.num_leaves != number for spec, number in specs):
        raise ValueError("the graph does not match its recorded arguments or results")


def _quotable(text: object) -> str:
    """Return `text`, which goes into generated source between quotes, if it cannot end them.

    Raises:
        ValueError: it can.
    """
    if not isinstance(text, str) or not text.isprintable() or set(text) & set("\"'\\"):
        raise ValueError(f"invalid key or path component {text!r}")
    return text


class _Spent:
    """Stands for a callable that a stored specification had."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(
            f"{self.__name__} is not stored with a converted model; prepare the float program again"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spent) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


def _tagged(kinds: Mapping[str, Codec]) -> Codec:
    """Return the codec of a value of one of several classes, with the name of its class."""

    def write(value: Any, path: str) -> Any:
        name = type(value).__name__
        if name not in kinds:
            raise ConfigError(f"{path} must be one of {', '.join(kinds)}, got {name}")
        return {name: kinds[name].write(value, path)}

    def read(data: Any, path: str) -> Any:
        ((name, inner),) = data.items()
        return kinds[name].read(inner, path)

    return Codec(write, read)


def _write_asked(choice: Any, path: str) -> Any:
    """Return what a claim asked for; an object of another package's by its word."""
    return ALGORITHM.write(choice if isinstance(choice, SmoothQuant) else word_of(choice), path)


_TYPES: dict[Any, Codec] = {
    torch.dtype: DTYPE,
    torch.qscheme: QSCHEME,
    Callable: Codec(
        lambda factory, path: factory_name(factory),
        lambda name, path: _Spent(TEXT.read(name, path)),
    ),
    int | str: plain("an integer or a string", lambda value: type(value) in (int, str)),
    AlgorithmChoice: Codec(_write_asked, ALGORITHM.read),
}
_TYPES[tuple[Node, Node] | Node] = of_type(Point, {})  # which stands for both in a plan
_TYPES[QuantizationSpecBase] = _tagged(
    {
        kind.__name__: of_type(kind, _TYPES)
        for kind in (
            *(QuantizationSpec, FixedQParamsQuantizationSpec),
            *(SharedQuantizationSpec, DerivedQuantizationSpec),
        )
    }
)
_FACTS = codecs_of(Record, _TYPES, leave_out=("backends", "state", "source"))


def encode_record(record: Record) -> Any:
    """Return the lasting part of a converted model's record as data.

    Raises:
        ConfigError: a specification of a class that core does not know.
    """
    return write_fields(record, Record, _FACTS, "record", defaults=True)


def decode_record(
    data: Mapping[str, Any], stages: tuple[str, ...] = ("converted", "reference")
) -> Record:
    """Return the record that data stands for, without backends and state.

    Raises:
        ValueError, TypeError, LookupError: the data is malformed.
    """
    record: Record = read_fields(data, Record, _FACTS, "record")
    if record.stage not in stages:
        raise ValueError(f"its plan is for stage {record.stage!r}, expected {' or '.join(stages)}")
    _check_references(record)
    return record


def changes_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes the record `after` of `before`, both as data: fields that differ, and the plan's."""
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    plan = {k: v for k, v in after["plan"].items() if before["plan"].get(k) != v}
    return {**changed, "plan": plan}


def with_changes(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record, as data, of which `changes_of` returned the changes."""
    return {**before, **changes, "plan": {**before["plan"], **changes["plan"]}}


def _check_references(record: Record) -> None:
    """Check that claims, groups and the groups of points are there where they are referred to."""
    plan = record.plan
    grouped = {point for group in plan.groups for point in group.points}
    if not grouped.issuperset(spec.point for claim in plan.claims for spec in claim.specs):
        raise ValueError("a point of a claim belongs to no group")
    claims = {
        *(*record.dropped, *record.kernels, *record.fallbacks),
        *(number for group in plan.groups for number in group.claims),
        *(operator.claim for operator in plan.operators if operator.claim is not None),
    }
    groups = {number for group in plan.groups for number in group.depends_on}
    for name, found, number in (("claim", claims, plan.claims), ("group", groups, plan.groups)):
        if not found.issubset(range(len(number))):
            raise ValueError(f"it refers to a missing {name}")
