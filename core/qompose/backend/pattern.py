# SPDX-License-Identifier: Apache-2.0
"""Patterns of operators, captured by the exporter and found with SubgraphMatcher.

A captured pattern follows aten wherever the exporter takes it. Captures are made once per process, and
only when the program holds the operators that the pattern says it needs.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher

from qompose.errors import ConfigError, near_names
from qompose.program.graph import arguments_of, one_thread_at_a_time
from qompose.spec.claim import Operand

Capture: TypeAlias = "Node | tuple[Any, ...] | object"
"""What a name of a pattern stands for in a match: a node, a list of nodes, or a literal argument."""
Shape: TypeAlias = "tuple[int, ...] | Callable[[], Tensor]"
"""An example tensor: its shape, or a function that makes it where numbers from a range will not do."""

_TRACES = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True)
class Match:
    """One occurrence of a pattern: its operators in graph order, and what its names stand for.

    `names` are those of all patterns of the rule; without any, every name may be asked for.
    """

    nodes: tuple[Node, ...]
    output: Node
    captures: Mapping[str, Capture]
    names: frozenset[str] = frozenset()

    def node(self, name: str) -> Node | None:
        """Return the node that a name stands for, None where it is absent or no node.

        Raises:
            ConfigError: no pattern of the rule has the name.
        """
        captured = self._captured(name)
        return captured if isinstance(captured, Node) else None

    def _captured(self, name: str) -> Capture:
        wrong = self.names and name not in self.names and name not in self.captures
        if wrong and name:  # a role that a rule does not have is ""
            raise ConfigError(
                f"no pattern of this rule defines the name {name!r}{near_names(name, self.names)}. "
                f"Names: {', '.join(sorted(self.names))}"
            )
        return self.captures.get(name)

    def tensors(self, name: str) -> tuple[Node, ...]:
        """Return the nodes that a name stands for, several for a list argument.

        Raises:
            ConfigError: no pattern of the rule has the name.
        """
        captured = self._captured(name)
        items = captured if isinstance(captured, (tuple, list)) else (captured,)
        return tuple(item for item in items if isinstance(item, Node))

    def argument(self, name: str, argument: str) -> Any:
        """Return an argument of an operator by its name in the schema, its default if left out.

        Raises:
            ConfigError: no operator of the match has this name, or it has no such argument.
        """
        node = self.node(name)
        if node is None or node not in self.nodes:
            raise ConfigError(f"{name!r} is no operator of this match. Names: {[*self.captures]}")
        known = arguments_of(node)
        if argument not in known:
            raise ConfigError(f"{node.name} has no argument {argument!r}. Arguments: {[*known]}")
        return known[argument]

    def operands(self, role: str) -> list[Operand]:
        """Return every place where the region reads what `role` stands for."""
        wanted = set(self.tensors(role))
        return [
            Operand(role, node.name, position)
            for node in self.nodes
            for position, argument in _arguments(node)
            if argument in wanted
        ]


def _arguments(node: Node) -> Iterator[tuple[tuple[int | str, ...], object]]:
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    for key, argument in places:
        if isinstance(argument, (tuple, list)):
            for index, item in enumerate(argument):
                yield (key, index), item
        else:
            yield (key,), argument


class OperatorIndex:
    """The nodes of a graph by the operator they call, built once per graph."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.position = {node: i for i, node in enumerate(module.graph.nodes)}
        self._by_target: dict[object, list[Node]] = defaultdict(list)
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._by_target[node.target].append(node)

    def calls(self, target: object) -> Sequence[Node]:
        """Return the calls of an operator, in graph order."""
        return self._by_target.get(target, ())


@dataclass(frozen=True)
class OperatorPattern:
    """One aten operator, in any of several overloads whose arguments have the same names.

    Names of a match are the operator's schema arguments, and "output".

    Args:
        targets: the overloads. Matching reads this and `result`; the rest is for tests of the rule
            (`qompose.testing`), and is not needed where every required argument is a tensor.
        example: a function of tensors that calls the first of `targets`, with the literals it needs:
            `lambda self: F.max_pool2d(self, 2)`. A parameter with the name of the rule's weight or bias
            is a parameter of the tested model, and so is `params_0` of a list of weights; others are inputs.
        shapes: for each parameter of `example` (or, without it, for each tensor argument of the operator).
        result: of operators with several results, which one leaves the region; a program that reads
            another one does not match. "output" is that result then, and "op" the operator.
    """

    targets: tuple[torch._ops.OpOverload, ...]
    example: Callable[..., Tensor] | None = None
    shapes: tuple[Shape, ...] = ()
    result: int | None = None

    @property
    def names(self) -> frozenset[str]:
        """Return the names that every match has: the arguments that all the operators have, and "output"."""
        arguments = [{a.name for a in target._schema.arguments} for target in self.targets]
        return self._own | frozenset(set.intersection(*arguments) if arguments else ())

    @property
    def any_names(self) -> frozenset[str]:
        """Return the names that a match may have: the arguments of any of the operators, and "output"."""
        return self._own.union(*({a.name for a in t._schema.arguments} for t in self.targets))

    @property
    def _own(self) -> frozenset[str]:
        return frozenset({"output"} if self.result is None else {"output", "op"})

    @property
    def faults(self) -> tuple[str, ...]:
        """Return what is wrong with the fields."""
        targets: Any = self.targets
        if not isinstance(targets, tuple) or not targets:
            return (f"targets must be a tuple of operators, got {targets!r}",)
        return tuple(_not_an_overload(t) for t in targets if not _is_overload(t))

    def find(self, index: OperatorIndex) -> Iterator[Match]:
        """Yield every call of the operators, in graph order."""
        calls = [node for target in self.targets for node in index.calls(target)]
        for node in sorted(calls, key=index.position.__getitem__):
            arguments = arguments_of(node)
            if self.result is None:
                yield Match((node,), node, {**arguments, "output": node})
            elif (output := self._only_result(node)) is not None:
                yield Match((node, output), output, {**arguments, "op": node, "output": output})

    def _only_result(self, node: Node) -> Node | None:
        """Return the call that takes the result, None where something reads another one too."""
        read = [user for user in node.users if user.users or user.target is not operator.getitem]
        taken = len(read) == 1 and read[0].target is operator.getitem
        return read[0] if taken and read[0].args[1] == self.result else None


@dataclass(frozen=True)
class Pattern:
    """A torch function to be found in a program.

    Args:
        function: takes tensors and returns the output, the only value that leaves the region.
        shapes: an example shape for each parameter (or a function that makes the tensor, such as one of
            indices); only ranks matter to matching, since literals are ignored. Tests of the rule
            (`qompose.testing`) call the function with such tensors, and with larger ones.
            Fewer shapes than parameters make a variant that leaves the last ones at their defaults.
        operators: names for operators that the function calls, as (name, operator); one that is called
            several times is named in the order of the calls. Programs without them are not searched.

    The names of a match are those of the parameters and of the operators, and "output".
    """

    function: Callable[..., Tensor]
    shapes: tuple[Shape, ...]
    operators: tuple[tuple[str, torch._ops.OpOverload], ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """Return what is wrong with the fields, as far as that is seen without capturing the function."""
        shapes: Any = self.shapes
        if not isinstance(shapes, tuple):
            return (f"shapes must be a tuple of shapes, got {shapes!r}",)
        faults = tuple(_signature_faults(self.function, len(shapes)))
        return faults or tuple(_named_faults(self.operators, self.parameters))

    def find(self, index: OperatorIndex) -> Iterator[Match]:
        """Yield every occurrence, overlapping ones too, in graph order of their outputs."""
        if not all(index.calls(target) for _, target in self.operators):
            return
        matcher = _matcher(self)
        for candidate in index.calls(matcher.sink.target):
            found = matcher.match_at(candidate)
            if found is not None:
                yield self._as_match(found, matcher, index)

    def _as_match(
        self, found: InternalMatch, matcher: _CandidateMatcher, index: OperatorIndex
    ) -> Match:
        captures: dict[str, Capture] = {
            name: found.nodes_map[node] for name, node in matcher.named.items()
        }
        captures["output"] = found.nodes_map[matcher.sink]
        for name, placeholder in zip(
            self.parameters, matcher.pattern_placeholder_nodes, strict=True
        ):
            captures[name] = found.nodes_map[placeholder]
        nodes = [n for p, n in found.nodes_map.items() if p.op == "call_function"]
        return Match(
            tuple(sorted(nodes, key=index.position.__getitem__)),
            found.nodes_map[matcher.sink],
            captures,
        )

    def calls(self) -> tuple[torch._ops.OpOverload, ...]:
        """Return the operators that the function calls, in their order. The pattern is captured for it."""
        nodes = _matcher(self).pattern.nodes
        return tuple(node.target for node in nodes if node.op == "call_function")

    @property
    def names(self) -> frozenset[str]:
        """Return the names that every match has."""
        return frozenset({*self.parameters, *(name for name, _ in self.operators), "output"})

    @property
    def any_names(self) -> frozenset[str]:
        """Return the names that a match may have, which are those of every match."""
        return self.names

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the function's parameters, as many as there are shapes."""
        return tuple(inspect.signature(self.function).parameters)[: len(self.shapes)]


class Chain:
    """A pattern's function that calls others, each on what the one before it returned.

    A table has hundreds of chains of a few dozen functions, and an export takes 0.04 s: each function is
    captured once for the tensors that it takes, and the captures are put together.

    Args:
        names: of the parameters; the first function takes the first of them.
        links: the functions, each with the names of the tensors that it takes beside the value.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        links: Sequence[tuple[Callable[..., Tensor], tuple[str, ...]]],
    ) -> None:
        self.names, self.links = names, tuple(links)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.names, tensors, strict=True))
        value = tensors[0]
        for function, others in self.links:
            value = function(value, *(given[name] for name in others))
        return value

    def __repr__(self) -> str:
        return " -> ".join(map(_name_of, (function for function, _ in self.links)))


def _name_of(function: object) -> str:
    """Return what errors call a function, which may be a module or another callable."""
    return getattr(function, "__qualname__", None) or repr(function)


def _is_overload(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def _not_an_overload(target: object) -> str:
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [name for name in target.overloads() if name != "out"]  # type: ignore[no-untyped-call]
        named = " or ".join(f"{target}.{name}" for name in overloads[:3])
        return f"{target} has several overloads; choose one, for example {named}"
    return f"expected an operator such as torch.ops.aten.linear.default, got {target!r}"


def _signature_faults(function: object, shapes: int) -> Iterator[str]:
    """Yield why a function cannot be called with a tensor for each of so many shapes."""
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        yield f"function must be a function of tensors, got {function!r}"
        return
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # torch's own functions are compiled, and have none
        yield (
            f"{name} has no signature to take tensor names from; wrap it: lambda input, weight, "
            f"bias: {name}(input, weight, bias)"
        )
        return
    least = sum(p.default is p.empty for p in parameters)
    if not least <= shapes <= len(parameters):
        names = ", ".join(parameter.name for parameter in parameters)
        yield f"{name} has the parameters {names}, but {shapes} shapes are given"


def _named_faults(operators: Any, parameters: Iterable[str]) -> Iterator[str]:
    names = set(parameters)
    for entry in operators:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            yield f"operators must be (name, operator) pairs, got {entry!r}"
        elif not _is_overload(entry[1]):
            yield _not_an_overload(entry[1])
        elif entry[0] in names:
            yield (
                f"the name {entry[0]!r} of an operator is taken by another operator or a parameter; give "
                "each a name of its own"
            )
        else:
            names.add(entry[0])


class _CandidateMatcher(SubgraphMatcher):
    """torch's matcher, asked about one candidate at a time.

    Its own `match` looks for cycles by walking the whole graph behind every match. A region out of which
    only its last value leads cannot be part of a cycle, and `_is_contained` ensures just that.

    Where literals are ignored, it lets a tensor stand for a literal and a literal for a tensor: a linear
    without bias for one with, `x + 2` for `x + y`. Such matches are refused here.
    """

    named: dict[str, Node]

    @cached_property
    def sink(self) -> Node:
        """Return the pattern's last operator."""
        return self.pattern_anchors[0]

    def _match_nodes(
        self, pn: Node, gn: Node, match: InternalMatch, node_name_match: str = ""
    ) -> bool:
        """Let one value stand for several parameters of the pattern, as in `x + x` or `conv(x) + x`."""
        if pn.op == "placeholder" and pn not in match.nodes_map and isinstance(gn, Node):
            others = [p for p, n in match.nodes_map.items() if n is gn]
            if all(other.op == "placeholder" for other in others):
                match.nodes_map[pn] = gn
                return True
        return super()._match_nodes(pn, gn, match, node_name_match)

    def match_at(self, node: Node) -> InternalMatch | None:
        """Return the match whose last operator is `node`."""
        match = InternalMatch(anchors=self.pattern_anchors)
        if not self._match_nodes(self.sink, node, match) or not self._is_contained(match.nodes_map):
            return None
        pairs = [(p, n) for p, n in match.nodes_map.items() if p.op == "call_function"]
        return match if all(_same_tensors(*pair) for pair in pairs) else None


def _same_tensors(pattern: Node, node: Node) -> bool:
    """Return whether two calls take tensors in the same places."""
    ours, theirs = arguments_of(pattern), arguments_of(node)
    return all(_is_tensor(ours[name]) == _is_tensor(theirs[name]) for name in ours)


def _is_tensor(argument: object) -> bool:
    """Return whether an argument is a tensor or a list of tensors; a symbolic size is a literal."""
    if isinstance(argument, (tuple, list)):
        return any(_is_tensor(item) for item in argument)
    return isinstance(argument, Node) and not isinstance(
        argument.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    )


class _Captured(nn.Module):
    """Gives a function the form that torch exports."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


@cache
def _matcher(pattern: Pattern) -> _CandidateMatcher:
    graph = _captured(pattern)
    graph.eliminate_dead_code()
    named = _named(pattern, graph)
    matcher = _CandidateMatcher(graph, ignore_literals=True)
    if len(matcher.pattern_anchors) != 1:
        raise ConfigError(
            f"pattern {_name_of(pattern.function)} must end in a single operator, whose output "
            "it returns"
        )
    unused = [
        name
        for name, node in zip(pattern.parameters, matcher.pattern_placeholder_nodes, strict=True)
        if not node.users
    ]
    if unused:
        raise ConfigError(
            f"pattern {_name_of(pattern.function)} never uses {', '.join(unused)}, so nothing matches "
            "it; take that parameter and its shape away, or use it"
        )
    matcher.named = named
    return matcher


@one_thread_at_a_time
def _captured(pattern: Pattern) -> Graph:
    """Return what a pattern's function is exported as.

    Raises:
        ConfigError: it does not take tensors of the pattern's shapes.
    """
    function = pattern.function
    try:
        example = tuple(s() if callable(s) else torch.zeros(s) for s in pattern.shapes)
        with torch.no_grad(), _without_traces():
            chained = _put_together(function, example) if isinstance(function, Chain) else None
            return chained or _exported(function, example)
    except Exception as error:  # the function is its author's, and may raise anything
        raise ConfigError(
            f"pattern {_name_of(function)} cannot be exported with inputs of its shapes "
            f"({_drawn(pattern)}): {_first_line(_own_error(pattern) or error)}"
        ) from error


def _exported(function: Callable[..., Tensor], example: tuple[Tensor, ...]) -> Graph:
    module = torch.export.export(_Captured(function), example).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module.graph


def _put_together(chain: Chain, example: tuple[Tensor, ...]) -> Graph | None:
    """Return the captures of a chain's functions in one graph, None where one reads a tensor of its own."""
    graph, given = Graph(), dict[str, Node]()
    for name, tensor in zip(chain.names, example, strict=True):
        given[name] = graph.placeholder(name)
        given[name].meta["val"] = tensor
    value = given[chain.names[0]]
    for function, others in chain.links:
        inputs = [value, *(given[name] for name in others)]
        link = _link(function, tuple(_kind(node.meta["val"]) for node in inputs))
        if link.find_nodes(op="get_attr"):
            return None
        read = link.find_nodes(op="placeholder")
        result: Any = graph.graph_copy(link, dict(zip(read, inputs, strict=True)))
        (value,) = result
    graph.output((value,))
    return graph


_Kind: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"


def _kind(tensor: Tensor) -> _Kind:
    return tuple(tensor.shape), tensor.dtype


@cache
def _link(function: Callable[..., Tensor], kinds: tuple[_Kind, ...]) -> Graph:
    """Return the capture of a chain's function, which is the same in all chains that have it."""
    return _exported(function, tuple(torch.zeros(s, dtype=dtype) for s, dtype in kinds))


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keep torch from logging a traceback of an error that is raised again, in fewer words."""
    before, _TRACES.disabled = _TRACES.disabled, True
    try:
        yield
    finally:
        _TRACES.disabled = before


def _own_error(pattern: Pattern) -> Exception | None:
    """Return what a pattern's function itself raises, which says more than its export does."""
    try:
        pattern.function(*(s() if callable(s) else torch.zeros(s) for s in pattern.shapes))
    except Exception as error:
        return error
    return None


def _drawn(pattern: Pattern) -> str:
    pairs = zip(pattern.parameters, pattern.shapes, strict=False)
    return ", ".join(f"{n}: {'a function' if callable(s) else list(s)}" for n, s in pairs)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _named(pattern: Pattern, graph: Graph) -> dict[str, Node]:
    """Find the operators that a pattern names.

    Names are given by operator, not by value: a value that is changed in place is another node after.
    """
    calls: dict[object, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        calls[node.target].append(node)
    called = ", ".join(str(target) for target in calls if _is_overload(target))
    named = {}
    for name, target in pattern.operators:
        if not calls[target]:
            raise ConfigError(
                f"pattern {_name_of(pattern.function)} has no call to {target} left for the "
                f"operator name {name!r}. It calls {called or 'no operator'}"
            )
        named[name] = calls[target].pop(0)
    return named
