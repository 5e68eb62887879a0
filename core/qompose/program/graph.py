# SPDX-License-Identifier: Apache-2.0
"""Reading and editing an fx graph: attributes, values, arguments, copies."""

from __future__ import annotations

import copy
import gc
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.graph import _PyTreeInfo
from torch.fx.node import map_arg

from qompose.program.meta import provenance_of


def copy_graph_module(module: GraphModule) -> GraphModule:
    """Copy the graph, those inside it, and their meta; share parameters; drop guards and dead state.

    The copy is a draft: code is generated for it only if it is run. `refresh` makes the final module.
    """
    graph = Graph()  # without the exporter's tracer, which cannot be unpickled
    # Not deepcopy: that copies the argument tree through a deprecated class of torch 2.13.
    graph._codegen = copy.copy(module.graph._codegen)
    copies: dict[Node, Node] = {}
    result = graph.graph_copy(module.graph, copies)
    graph.output(result).meta = dict(module.graph.output_node().meta)
    for node in list(graph.nodes):
        if node.op == "call_module" and str(node.target).rpartition(".")[2] == "_guards_fn":
            graph.erase_node(node)
    clean = _LazyGraphModule(module, graph, "GraphModule")
    replace_nested(clean, copy_graph_module)
    clean.meta = dict(module.meta)
    clean.train(module.training)
    return clean


def replace_nested(module: GraphModule, function: Callable[[GraphModule], GraphModule]) -> None:
    """Replace every graph module that a program reads as an attribute, a body, by `function` of it."""
    targets = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for target in sorted(targets):
        body = get_attribute(module, target)
        if isinstance(body, GraphModule):
            set_attribute(module, target, function(body))


def refresh(module: GraphModule) -> GraphModule:
    """Regenerate the code of a module whose graph was edited, dropping state that nothing reads."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    clean = GraphModule(module, module.graph, "GraphModule")
    replace_nested(clean, refresh)
    clean.meta = module.meta
    clean.train(module.training)
    return clean


def freeze(module: GraphModule) -> None:
    """Replace parameters by ones that need no gradient, in place. They share their values."""
    frozen: dict[int, nn.Parameter] = {}
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in frozen:
            frozen[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        set_attribute(module, path, frozen[id(parameter)])


def get_attribute(module: nn.Module, target: str) -> Any:
    """Follow a dotted path from `module`."""
    for name in target.split("."):
        module = getattr(module, name)
    return module


def set_attribute(module: nn.Module, target: str, value: Tensor | nn.Module) -> None:
    """Store a buffer, parameter or module at a dotted path, making the modules on the way."""
    *path, last = target.split(".")
    for name in path:
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = getattr(module, name)
    if last in module._parameters or last in module._buffers or last in module._modules:
        delattr(module, last)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(last, value)
    else:
        setattr(module, last, value)


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors. Those that share memory share it in their copies too."""
    memo: dict[int, Any] = {}
    return {name: copy.deepcopy(tensor.detach(), memo) for name, tensor in tensors.items()}


def undo_writes(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return what undoes all that is written to tensors from now on.

    It does so in place: the methods of one program share them.
    """
    memo: dict[int, Any] = {}
    before = [(tensor, copy.deepcopy(tensor.detach(), memo)) for tensor in tensors]

    def undo() -> None:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)

    return undo


def own_copy(value: Tensor) -> Tensor:
    """Return a copy with memory of its own: a parameter if `value` is one, that is trained if `value` is."""
    copied = value.detach().clone()
    return nn.Parameter(copied, value.requires_grad) if isinstance(value, nn.Parameter) else copied


def give_own_parameters(module: GraphModule) -> None:
    """Replace all parameters and buffers by copies, in place; what is one tensor stays one."""
    copies: dict[int, Tensor] = {}
    state = [*module.named_parameters(remove_duplicate=False)]
    for path, value in [*state, *module.named_buffers(remove_duplicate=False)]:
        if id(value) not in copies:
            copies[id(value)] = own_copy(value)
        set_attribute(module, path, copies[id(value)])


def remove_dead(graph: Graph, kept: Collection[Node]) -> None:
    """Remove what nothing reads, except `kept`: calls that had no readers before are there for their effect.

    Torch's own notion of effects does not know bodies that write, operators without results, and vmap's.
    """
    for node in reversed(list(graph.nodes)):
        live = node.users or node in kept or node.op in ("placeholder", "output")
        if not live and not node.is_impure():
            graph.erase_node(node)


def without_readers(module: GraphModule) -> set[Node]:
    """Return the nodes of a graph that nothing reads, and that may have an effect all the same.

    Taking one of several results has none; exported graphs take those that nobody wants as well.
    """
    nodes = module.graph.nodes
    return {node for node in nodes if not node.users and node.target is not operator.getitem}


def drop_attribute(module: nn.Module, target: str) -> None:
    """Remove what stands at a dotted path; the modules on the way stay."""
    path, _, last = target.rpartition(".")
    delattr(get_attribute(module, path) if path else module, last)


def owner_of(node: Node) -> GraphModule:
    """Return the module to whose graph a node belongs: the program, or a body inside it."""
    module = node.graph.owning_module
    assert module is not None
    return module


def free_attribute(module: nn.Module, target: str) -> str:
    """Return `target`, or of `target_1`, `target_2`, ... one that holds nothing behind one that does.

    Programs may have thousands of constants of one name, so this looks for it by bisection.
    """
    if not holds(module, target):
        return target
    held, free = 0, 1
    while holds(module, f"{target}_{free}"):
        held, free = free, 2 * free
    while free - held > 1:
        middle = (held + free) // 2
        held, free = (middle, free) if holds(module, f"{target}_{middle}") else (held, middle)
    return f"{target}_{free}"


def holds(module: nn.Module, target: str) -> bool:
    """Tell whether anything stands at a dotted path."""
    for name in target.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def constant_of(node: Node) -> Tensor | None:
    """Return the parameter or buffer that a get_attr node reads, None for any other node."""
    if node.op != "get_attr":
        return None
    module = node.graph.owning_module
    assert module is not None
    value = get_attribute(module, str(node.target))
    return value if isinstance(value, Tensor) else None


def address_of(constant: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return constant.untyped_storage().data_ptr()


def layout_of(constant: Tensor) -> tuple[object, ...]:
    """Return what tied parameters have in common, and no others: memory, place in it, shape, strides."""
    return (
        address_of(constant),
        constant.storage_offset(),
        tuple(constant.shape),
        constant.stride(),
        constant.dtype,
    )


def arguments_of(call: Node) -> dict[str, Any]:
    """Return the arguments of an operator's call by their names in its schema, defaults included."""
    return {
        argument.name: call.args[i]
        if i < len(call.args)
        else call.kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(call.target._schema.arguments)  # type: ignore[union-attr]
    }


def pytree_info(graph: Graph) -> _PyTreeInfo | None:
    """Return the names and trees of a program's arguments and results; None of a graph without trees."""
    info: _PyTreeInfo | None = getattr(graph._codegen, "pytree_info", None)
    return info


def value_of(node: Node) -> Any:
    """Return the example value (a fake tensor, as a rule) that export recorded for a node."""
    return node.meta.get("val")


def dtype_of(node: object) -> torch.dtype | None:
    """Return the dtype of a node's value, None where it is not one tensor."""
    if not isinstance(node, Node):
        return None
    value = value_of(node)
    if value is None:
        value = constant_of(node)
    return value.dtype if isinstance(value, Tensor) else None


def is_float_tensor(node: object) -> bool:
    """Tell whether a node's value is one floating point tensor."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def is_quantizable(node: object) -> bool:
    """Tell whether a node's value is a tensor of a type that quantize operators take."""
    return dtype_of(node) in (torch.float32, torch.float16, torch.bfloat16)


def module_path(node: Node) -> str:
    """Return the dotted path of the module that called the operator, "" for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _without_prefix(path)


def module_stack(node: Node) -> Iterator[tuple[str, str]]:
    """Yield (module path, qualified type name) of the modules around a node, outermost first."""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        yield _without_prefix(path), name


def _without_prefix(path: str) -> str:
    """Strict export writes paths as `L['self'].layer`, the default one as `layer`."""
    return path.removeprefix("L['self']").removeprefix(".")


def operator_name(target: object) -> str:
    """Return `aten.linear` for the overload aten.linear.default, the qualified name of any other callable."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def describe(node: Node) -> str:
    """Return a node's name with its operator and module path, for messages."""
    where = module_path(node)
    what = operator_name(node.target) if node.op == "call_function" else node.op
    return f"{node.name} ({what}{f' in {where}' if where else ''})"


def call(
    graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], like: Node, value: Any
) -> Node:
    """Insert a call at the insertion point, with `like`'s provenance and `value` as its example."""
    node = graph.call_function(target, args)
    node.meta = provenance_of(like)
    node.meta["val"] = value
    return node


def read_attribute(module: GraphModule, target: str, like: Node) -> Node:
    """Insert a get_attr node at the insertion point, with the example value of a fake tensor."""
    node = module.graph.get_attr(target)
    node.meta = provenance_of(like)
    node.meta["val"] = example_of(get_attribute(module, target), like)
    return node


_Examples: TypeAlias = WeakValueDictionary[tuple[Any, ...], Any]
_EXAMPLES: WeakKeyDictionary[Any, _Examples] = WeakKeyDictionary()
"""Examples by their fake mode, as long as programs have them: each holds its mode."""


def example_of(constant: Tensor, like: Node) -> Any:
    """Return a fake tensor of `constant` in the fake mode of a neighbouring node, where it has one."""
    mode = getattr(value_of(like), "fake_mode", None)
    if mode is None:
        return constant
    key = (tuple(constant.shape), constant.dtype, constant.device)
    known = _EXAMPLES.setdefault(mode, WeakValueDictionary())
    found = known.get(key)
    if found is None:  # making one takes longer than all else that is done for a parameter
        found = known[key] = value_of(like).new_empty(key[0], dtype=key[1], device=key[2])
    return found


def result_of(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what an operator gives for examples, fake tensors as a rule, and leave their open sizes open.

    torch's operators in C++ that call others, such as padding, read sizes as numbers. That would fix a
    dynamic size for good, in the exported program too. The exporter has them take the same way as here.
    """
    with enable_python_dispatcher():
        return target(*args, **kwargs)


def result_on(call: Node, values: Mapping[Node, Any]) -> Any:
    """Return what a call gives for examples of what it reads, None where one is missing or it cannot run.

    What it asks of open sizes is answered for the example, and leaves them open.
    """
    if any(values[read] is None for read in call.all_input_nodes):
        return None
    target: Any = call.target
    args, kwargs = map_arg((call.args, dict(call.kwargs)), values.__getitem__)
    modes = (getattr(value, "fake_mode", None) for value in values.values())
    mode: Any = next(filter(None, modes), None)
    sizes = getattr(mode, "shape_env", None)
    try:
        with mode or nullcontext(), sizes.suppress_guards() if sizes else nullcontext():
            return result_of(target, *args, **kwargs)
    except Exception:  # an operator without a fake implementation says nothing
        return None


def sizes_differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Tell whether sizes are known to differ: in the example, or since one is a number and one an open size.

    What is expressed in another way does not, as such, nor what only data tell. This adds no guards.
    """
    return len(one) != len(other) or any(map(_size_differs, one, other))


def _size_differs(one: Any, other: Any) -> bool:
    sizes = [s.node for s in (one, other) if isinstance(s, torch.SymInt)]
    first, second = (s.node.hint if isinstance(s, torch.SymInt) else s for s in (one, other))
    if first is None or second is None:
        return statically_known_true(one != other)
    constant = [size for size in (one, other) if isinstance(size, int) or size.node.expr.is_Integer]
    return first != second or (len(constant) == 1 and any(size.expr.is_Symbol for size in sizes))


def behind_modules(argument: Any) -> Node:
    """Return the value that an argument is, behind calls of modules: observers hand it on."""
    while argument.op == "call_module":
        argument = argument.args[0]
    assert isinstance(argument, Node)
    return argument


def reached(start: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return some nodes with all to which steps lead from them."""
    found = set(start)
    waiting = list(found)
    while waiting:
        new = [node for node in step(waiting.pop()) if node not in found]
        found.update(new)
        waiting += new
    return found


def first_user(node: Node) -> Node:
    """Return the first operator behind an observer node, other observers skipped; else the node."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop(0)
        if user.op == "call_function":
            return user
        waiting += [] if user.op == "output" else list(user.users)
    return node


_P = ParamSpec("_P")
_T = TypeVar("_T")
_TRACING = RLock()


def _in_child() -> None:
    """Unlock what threads held that a forked process does not have."""
    global _TRACING
    _TRACING = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def one_thread_at_a_time(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let threads wait for each other in all functions that this decorates.

    For what exports or computes with fake tensors: torch exports in one thread at a time, and copies of a
    program share the mode of its fake tensors, which holds what the one operator that runs is at.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _TRACING:
            return function(*args, **kwargs)

    return run


@contextmanager
def paused_collection() -> Iterator[None]:
    """Keep Python's cycle collector from walking a growing graph over and over.

    Measured on chains of linear and relu: `prepare_pt2e` takes 0.74 s with it and 0.96 s without for 500 of
    them, 4.2 s and 5.6 s for 2,000. `convert_pt2e` would gain 2 to 3 % and does not use it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def replace_in_place(model: Any, result: GraphModule) -> GraphModule:
    """Make `model` itself the result, for `inplace=True`."""
    model.__dict__ = result.__dict__
    model.__class__ = result.__class__
    same: GraphModule = model
    return same
