# SPDX-License-Identifier: Apache-2.0
"""What aten operators are: which preserve values, how much each multiplies, and where it comes from.

Where an operator only moves values, `op(quantize(x)) == quantize(op(x))` for any parameters: input and
output have one scale, and the operator may run on the integers. The same holds where it selects by
order. Any other operator makes values that no input had, and its output has a scale of its own.

An operator nearly always has the name of the torch function that it comes from, with an underscore behind it
where it works in place; `_NAMES` has the exceptions, and a function that torch writes with several operators
has none. Quantizers ask where an operator comes from by `source_fn_stack`, as strict export writes it.
`get_source_partitions(graph, [nn.Conv2d, F.conv2d, operator.add])`, which quantizers and tutorials find
operators with, reads this entry of a node's meta. The default, non-strict export does not write it, so
that such quantizers silently find nothing, or modules only. `with_sources` writes it from what both
exports do record: `nn_module_stack`, and `torch_fn`, the function of torch that the model called.

Strict export writes one source, a class or a function. `Source` is equal to each that the operator can be
asked for by. Which, and what belongs together then:

| asked for                     | it is                                          | a partition is           |
|-------------------------------|------------------------------------------------|--------------------------|
| class of `torch.nn`           | that of the innermost module                   | a call in that module    |
| any other class               | that of the innermost module                   | a run of that module     |
| function, outside `torch.nn`  | what the model calls; `operator.add` for `a + b` | a call                 |
| name of a function, or method | what the model calls, in modules too           | a call                   |
| aten operator                 | the node's                                     | a node                   |

The first and third rows are strict export's. The others are what torch does for programs without the
entry, which it no longer does for those that have one, and what quantizers by aten operator ask.

A parameter belongs to its last reader, as in strict export. Operators in bodies of control flow are outside
of all modules: export does not record theirs. Methods cannot be told from Python's operators.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch.fx import Graph, GraphModule, Node

from qompose.errors import SelectorError
from qompose.program.control_flow import LAYOUTS, graphs_in, is_nested_call
from qompose.program.decompositions import known_as
from qompose.program.graph import constant_of, get_attribute, module_stack, value_of

aten = torch.ops.aten
VALUE_PRESERVING = frozenset(
    {
        operator.getitem,
        aten.alias.default,
        aten.cat.default,
        aten.channel_shuffle.default,
        aten.chunk.default,
        aten.clone.default,
        aten.concat.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.expand_as.default,
        aten.flatten.using_ints,
        aten.flip.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.narrow.default,
        aten.permute.default,
        aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default,
        aten.repeat.default,
        aten.repeat_interleave.self_int,
        aten.reshape.default,
        aten.reshape_as.default,
        aten.roll.default,
        aten.rot90.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.stack.default,
        aten.swapaxes.default,
        aten.t.default,
        aten.tile.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unflatten.int,
        aten.unfold.default,
        aten.unsqueeze.default,
        aten.upsample_nearest1d.vec,
        aten.upsample_nearest2d.vec,
        aten.view.default,
        aten.view_as.default,
    }
)
"""Operators whose output has no value that an input had not: they move, repeat or leave out values."""
ORDER_PRESERVING = frozenset(
    {
        aten.adaptive_max_pool2d.default,
        aten.amax.default,
        aten.amin.default,
        aten.max_pool1d.default,
        aten.max_pool2d.default,
        aten.max_pool3d.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.relu.default,
        aten.relu_.default,
    }
)
"""Operators that choose among values (and zero) by their order, which quantization keeps."""
_MOVES = {str(getattr(target, "__name__", target)).partition(".")[0] for target in VALUE_PRESERVING} | {
    "_to_copy", "_unsafe_view", "broadcast_to", "copy", "copy_", "dropout", "dropout_", "feature_dropout",
    "lift_fresh_copy", "squeeze_", "to", "type_as", "unsqueeze_",
}  # fmt: skip


def only_moves(operator: str) -> bool:
    """Tell whether an operator, named as reports name it, only moves, casts or copies values."""
    return operator.removeprefix("aten.").partition(".")[0] in _MOVES


SCALE_PRESERVING = VALUE_PRESERVING | ORDER_PRESERVING
"""Operators whose inputs and output may have one scale and zero point."""
NOT_ON_INTEGERS: dict[object, frozenset[torch.dtype]] = {
    aten.adaptive_max_pool2d.default: frozenset({torch.int8, torch.uint8}),
    aten.max_pool1d.default: frozenset({torch.int8, torch.uint8}),
    aten.upsample_nearest1d.vec: frozenset({torch.int8}),
    aten.upsample_nearest2d.vec: frozenset({torch.int8}),
}
"""Those of them that torch 2.13 cannot compute on a CPU in some integer types."""


_NAMES: dict[str, tuple[str, ...]] = {
    "adaptive_max_pool1d_with_indices": ("adaptive_max_pool1d",),
    "adaptive_max_pool2d_with_indices": ("adaptive_max_pool2d",),
    "adaptive_max_pool3d_with_indices": ("adaptive_max_pool3d",),
    "affine_grid": ("affine_grid_generator",),
    "cross_entropy": ("cross_entropy_loss",),
    "dropout1d": ("feature_dropout",),
    "dropout2d": ("feature_dropout",),
    "dropout3d": ("feature_dropout",),
    "fold": ("col2im",),
    "grid_sample": ("grid_sampler",),
    "_threshold": ("threshold",),
    "unfold": ("im2col", "unfold"),
    # The names of Python's operators.
    "truediv": ("div",),
    "floordiv": ("floor_divide",),
    "mod": ("remainder",),
    "sub": ("sub", "rsub"),
    "invert": ("bitwise_not",),
    "and_": ("bitwise_and",),
    "or_": ("bitwise_or",),
    "xor": ("bitwise_xor",),
}
_NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
_UPSAMPLING = (
    *_NEAREST,
    *(f"_{name.replace('nearest', 'nearest_exact')}" for name in _NEAREST),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_NAMES |= dict.fromkeys(("interpolate", "upsample"), _UPSAMPLING)
_NAMES["upsample_nearest"] = _NEAREST
_NAMES["upsample_bilinear"] = ("upsample_bilinear2d",)
_MODULES = ("torch", "_operator", "operator")


def aten_operators(function: Callable[..., Any]) -> frozenset[torch._ops.OpOverloadPacket]:
    """Return the operators that calls of a function of torch, or of `operator`, are exported as.

    Args:
        function: `F.linear`, `torch.add`, `torch.Tensor.view`, `operator.add`, ...; a function and its
            form that works in place stand for each other.

    Raises:
        SelectorError: it is not a function of torch, or torch computes it with several operators.
    """
    name = getattr(function, "__name__", "")
    if not name or not is_torch_function(function):
        raise SelectorError(f"expected a torch function, got {function!r}")
    names = _names_of(name, in_python=_home(function) in ("_operator", "operator"))
    found = {
        getattr(aten, candidate)
        for base in names
        for candidate in (base, f"{base}_")
        if hasattr(aten, candidate)
    }
    if not found:
        raise SelectorError(
            f"{name} is not a single aten operator; pass the operators it is exported as "
            "(torch.ops.aten...), or the type of the module that calls it"
        )
    return frozenset(found)


_COPIES = {
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
}


def is_copy(node: Node) -> bool:
    """Tell whether an operator gives the values that it reads, in their shape, whatever they are."""
    if node.target not in _COPIES:
        return False
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", False)
    return not training


def is_torch_function(candidate: object) -> bool:
    """Tell whether a function or operator is torch's, or one of `operator`."""
    if isinstance(candidate, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    return callable(candidate) and _home(candidate).partition(".")[0] in _MODULES


def _names_of(name: str, *, in_python: bool) -> tuple[str, ...]:
    """Return the operators' names, for a function, a method such as `__add__`, or an in-place form."""
    if name.startswith("__") and name.endswith("__"):
        name, in_python = name.strip("_"), True
    if in_python and name not in _NAMES and not hasattr(aten, name) and name[:1] in ("i", "r"):
        name = name[1:]  # iadd, __radd__
    base = name if name in _NAMES else name.rstrip("_")
    return _NAMES.get(base, (base,))


def _home(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__objclass__", function)  # methods of tensors say their class
    return str(getattr(owner, "__module__", None) or getattr(function, "__module__", None) or "")


KEY = "source_fn_stack"
"""The key in `node.meta`."""
_METHODS = {
    "truediv": ("div",),
    "floordiv": ("floor_divide",),
    "mod": ("remainder",),
    "pos": ("positive",),
    "and": ("bitwise_and",),
    "or": ("bitwise_or",),
    "xor": ("bitwise_xor",),
}
"""Methods of tensors that Python's operators are, where they have other names."""


def with_sources(model: GraphModule) -> None:
    """Give every operator and parameter of a program and its bodies its source, in place.

    What strict export or a quantizer wrote stays; what an earlier call wrote, perhaps copied to other nodes
    since, is written anew. No step that saves a program understands these entries: give them to a copy
    that quantizers are asked about, or take them away by `without_sources`.
    """
    without_sources(model)
    for part in graphs_in(model):
        _write(part.graph.nodes)


def without_sources(model: GraphModule) -> None:
    """Remove, in place, what `with_sources` wrote."""
    for part in graphs_in(model):
        for node in part.graph.nodes:
            if any(isinstance(entry, Origin) for entry in node.meta.get(KEY) or ()):
                del node.meta[KEY]


class Source:
    """What an operator comes from: equal to every class, function, name and operator in the table above.

    Those who ask compare and then look up or group by it, so its hash is that of what it was last found
    equal to, and `partition` what the operator belongs to then.
    """

    def __init__(self, node: Node, call: str, joined: str) -> None:
        stack = list(module_stack(node))
        self.operator, self.name, self.call, self.joined = node.target, node.name, call, joined
        self.function = _function_of(node)
        self.kind = stack[-1][1] if stack else ""
        # These classes are what strict export names as the source, and not what they call.
        self.in_torch = self.kind.startswith(("torch.nn.modules.", "torch.ao."))
        self.module = _run_of(node) or call
        self.asked: object = self.kind if self.in_torch else self.function or self.name
        self.partition = call

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Source):
            return self.asked == other.asked
        partition = self.partition_for(other)
        if partition is None:
            return False
        self.asked, self.partition = other, partition
        return True

    def __hash__(self) -> int:
        return hash(self.asked)

    def __repr__(self) -> str:
        return f"Source({self.kind if self.in_torch else self.function or self.operator})"

    def partition_for(self, wanted: object) -> str | None:
        """Return what the operator belongs to for those who ask for `wanted`, None where it is not that."""
        if isinstance(wanted, type):
            if f"{wanted.__module__}.{wanted.__qualname__}" != self.kind:
                return None
            return self.joined if self.in_torch else self.module
        if isinstance(wanted, str):
            if wanted == self.kind:
                return self.module
            return self.call if wanted == self._name_of_function() else None
        if isinstance(wanted, torch._ops.OpOverload) and wanted == self.operator:
            return self.name
        return self.call if not self.in_torch and self._is_call_of(wanted) else None

    def _name_of_function(self) -> str:
        if self.function:
            return self.function.split(".")[1]
        return str(getattr(self.operator, "overloadpacket", self.operator)).rpartition(".")[2]

    def _is_call_of(self, wanted: Any) -> bool:
        if not callable(wanted):
            return False
        kind, name = type(wanted).__name__, getattr(wanted, "__name__", "")
        if not self.function:  # made by some transformation: all that is known is the operator
            return _is_exported_as(wanted, self.operator)
        if getattr(wanted, "__module__", None) == "_operator":
            how, _, called = self.function.partition(".")
            return how in _OF_TENSORS and called in _methods_of(name)
        return self.function == f"{kind}.{name}"


class Origin(Sequence[Any]):
    """An entry of `source_fn_stack`: (what the operator belongs to, its source).

    The former depends on what the source was last found equal to.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return (self.source.partition, self.source)[index]

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return f"({self.source.partition!r}, {self.source!r})"


def _write(nodes: Iterable[Node]) -> None:
    first: dict[object, str] = {}
    operators = [node for node in nodes if node.op == "call_function"]
    calls = {node: first.setdefault(_call_of(node), node.name) for node in operators}
    for node in operators:
        if KEY not in node.meta:
            node.meta[KEY] = [Origin(Source(node, calls[node], calls[_served(node)]))]
    written = {node for node in nodes if KEY in node.meta}
    for node in operators:  # a parameter comes from where it is read last
        for read in set(node.all_input_nodes) - written:
            if constant_of(read) is not None:
                read.meta[KEY] = list(node.meta[KEY])
                # Filters by module name that look at all nodes of a partition find the module there.
                read.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack", {}))


def _call_of(node: Node) -> object:
    """Return a key that the operators of one call of a function of torch have in common."""
    if _function_of(node) is None:
        return node
    return node.meta["torch_fn"], _run_of(node)


def _served(node: Node) -> Node:
    """Return the operator that one is a part of: a convolution that pads by reflection calls `pad` itself.

    Strict export makes two convolutions of that, one of which is none.
    """
    user = next(iter(node.users), None)
    alone = len(node.users) == 1 and user is not None and user.op == "call_function"
    pads = node.target is torch.ops.aten.pad.default
    return user if user is not None and alone and pads and _run_of(user) == _run_of(node) else node


def _function_of(node: Node) -> str | None:
    """Return the function of torch that the model called, as `function.relu`, None where it called none."""
    name, function = node.meta.get("torch_fn") or ("_0", None)
    made_by_export = name.endswith("_0")  # what the model calls is counted from 1
    return None if made_by_export else function


def _run_of(node: Node) -> str:
    """Return a key of one run of the innermost module: a module that runs again gets another."""
    return str(next(reversed(node.meta.get("nn_module_stack") or {"": None})))


_OF_TENSORS = ("method_descriptor", "wrapper_descriptor", "function")


def _methods_of(name: str) -> set[str]:
    """Return the methods of tensors that a function of `operator` calls."""
    bare = name.strip("_")
    rest = bare[1:]
    in_place = bare[0] == "i" and any(hasattr(operator, word) for word in (rest, f"{rest}_"))
    base = rest if in_place else bare
    words = {base, *_METHODS.get(base, ())}
    if base == "matmul" or not in_place:  # `x @= y` is `x = x @ y`
        return words | {f"__{word}__" for word in words} | {f"__r{word}__" for word in words}
    return {f"__{bare}__"} | {f"{word}_" for word in words}


def _is_exported_as(function: Any, target: Any) -> bool:
    try:
        return getattr(target, "overloadpacket", None) in aten_operators(function)
    except SelectorError:
        return False


def macs(node: Node) -> int:
    """Return the multiply-accumulates of one call: products, convolutions, attention, recurrence; else 0.

    A control-flow operator counts what is inside it: every branch, and a loop once for each of its steps.
    """
    count = _MACS.get(known_as(node))
    if count is None:
        inside = sum(macs(inner) for graph in graphs_inside(node) for inner in graph.nodes)
        return inside * steps_of(node)
    return int(count(node)) if all(map(_is_known, (node, *node.all_input_nodes))) else 0


def _is_known(node: Node) -> bool:
    """Tell whether a value's shape is known: a quantizer's transform may have recorded none."""
    return value_of(node) is not None or constant_of(node) is not None


def steps_of(call: Node) -> int:
    """Return how often a call runs its bodies: along the first dimension of what it cuts into slices.

    A while_loop runs as often as its data say; it counts as one pass.
    """
    place = LAYOUTS[call.target].slices if is_nested_call(call) else None
    sliced: Any = () if place is None else call.args[place]
    return max((_shape(operand)[0] for operand in sliced), default=1)


def graphs_inside(node: Node) -> list[Graph]:
    """Return the graphs that a control-flow operator calls."""
    module = node.graph.owning_module
    targets = [str(a.target) for a in node.all_input_nodes if a.op == "get_attr"]
    found = [get_attribute(module, target) for target in targets] if module is not None else []
    return [value.graph for value in found if isinstance(value, GraphModule)]


def _shape(node: Any) -> list[int]:
    value = value_of(node)
    value = constant_of(node) if value is None else value
    sizes: list[Any] = list(getattr(value, "shape", ()))
    # A size that depends on data, as of nonzero, has no example: it counts as one.
    return [(s.node.hint or 1) if isinstance(s, torch.SymInt) else int(s) for s in sizes]


def _linear(node: Node) -> int:
    return math.prod(_shape(node)) * _shape(node.args[1])[1]


def _convolution(node: Node) -> int:
    return math.prod(_shape(node)) * math.prod(_shape(node.args[1])[1:])


def _transposed(node: Node) -> int:
    return math.prod(_shape(node.args[0])) * math.prod(_shape(node.args[1])[1:])


def _product(node: Node, first: int = 0) -> int:
    return math.prod(_shape(node)) * _shape(node.args[first])[-1]


def _grouped(node: Node) -> int:
    """Each row is multiplied by the matrix of its group; or groups of columns by groups of rows."""
    groups_inside = len(_shape(node.args[0])) == len(_shape(node.args[1])) == 2
    return _product(node) // (_shape(node)[0] if groups_inside else 1)


def _attention(node: Node) -> int:
    *batch, queries, values = _shape(node)
    keys, width = _shape(node.args[1])[-2:]
    return math.prod(batch) * queries * keys * (width + values)


def _recurrent(node: Node) -> int:
    """Every step of every sequence multiplies by each matrix once."""
    listed = node.args[2]  # those of a cell are arguments of their own
    sizes = [_shape(p) for p in (listed if isinstance(listed, (tuple, list)) else node.args[2:4])]
    positions = math.prod(_shape(node.args[0])[:-1])
    return positions * sum(math.prod(size) for size in sizes if len(size) == 2)


_MACS: dict[Any, Callable[[Node], int]] = {
    aten.linear.default: _linear,
    **dict.fromkeys(
        [
            getattr(packet, overload)
            for packet in (aten.conv1d, aten.conv2d, aten.conv3d)
            for overload in ("default", "padding")
        ],
        _convolution,
    ),
    aten.conv_transpose1d.default: _transposed,
    aten.conv_transpose2d.input: _transposed,
    aten.conv_transpose3d.input: _transposed,
    aten.matmul.default: _product,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten._grouped_mm.default: _grouped,
    aten.addmm.default: partial(_product, first=1),
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(
        [
            operator
            for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
            for operator in (getattr(aten, kind).input, getattr(aten, f"{kind}_cell").default)
        ],
        _recurrent,
    ),
}
