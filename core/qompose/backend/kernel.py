# SPDX-License-Identifier: Apache-2.0
"""What a kernel sees of the region it replaces: integers in, integers out, literals, and a place to write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import ConfigError, InternalError
from qompose.program.aliasing import why_not_alone
from qompose.program.aten_operators import (
    NOT_ON_INTEGERS,
    ORDER_PRESERVING as ORDER_PRESERVING,  # public here
    SCALE_PRESERVING as SCALE_PRESERVING,
    VALUE_PRESERVING as VALUE_PRESERVING,
)
from qompose.program.disk import unpacked
from qompose.program.graph import (
    arguments_of,
    call,
    constant_of,
    free_attribute,
    holds,
    layout_of,
    read_attribute,
    result_of,
    set_attribute,
    value_of,
)
from qompose.spec import qdq
from qompose.spec.claim import Claim


@dataclass(frozen=True)
class Kernel:
    """What replaces a claimed region on one target.

    Attributes:
        name: in reports and capabilities: the operator that is called.
        emit: inserts the call with `Region.call` and returns its node; raises `NotLowerable`, with the
            reason, where the kernel does not fit. Where it is None, or returns None, the region stays as
            it is, for the target's last step to take whole.
        float_output: the call gives floats even where consumers want integers, who then quantize for
            themselves.
        float_arithmetic: the call reads integers and computes in float: reports do not count it as int8.
        otherwise: the kernel that is tried where `emit` found that this one does not fit.
        unverified: nothing that runs here confirms the kernel, as where its runtime never loads the program:
            reports list it apart, and `assert_lowered` does not count it.

    Raises:
        ConfigError: a field has a value of the wrong type.
    """

    name: str
    emit: Callable[[Region], Node | None] | None = None
    float_output: bool = False
    float_arithmetic: bool = False
    otherwise: Kernel | None = None
    unverified: bool = False

    def __post_init__(self) -> None:
        """Refuse what would fail where a model is lowered."""
        for name, given, fits, wanted in (
            ("name", self.name, isinstance(self.name, str), "a string"),
            ("emit", self.emit, self.emit is None or callable(self.emit), "callable"),
            ("otherwise", self.otherwise, isinstance(self.otherwise, Kernel | None), "a Kernel"),
        ):
            if not fits:
                raise ConfigError(f"Kernel({self.name!r}): {name} must be {wanted}, got {given!r}")

    @property
    def chain(self) -> tuple[Kernel, ...]:
        """Return this kernel and those that are tried after it."""
        return (self, *(self.otherwise.chain if self.otherwise is not None else ()))

    @property
    def promise(self) -> str:
        """Return the names of the chain, in order."""
        return ", else ".join(kernel.name for kernel in self.chain)


class NotLowerable(Exception):  # noqa: N818 - it says what the region is
    """Raised by a kernel's `emit` with the reason why a region must stay as it is.

    Raises:
        TypeError: the reason is no text, or empty. Whoever lowers is told the kernel and its rule.
    """

    def __init__(self, reason: str = "") -> None:
        if not isinstance(reason, str) or not reason.strip():
            raise TypeError(f"NotLowerable needs the reason as text, got {reason!r}")
        super().__init__(reason)


aten = torch.ops.aten
Readers: TypeAlias = "Mapping[tuple[object, ...], tuple[Claim, ...]]"
"""By `layout_of` a parameter, the claims whose regions read it."""


@dataclass(frozen=True)
class Shared:
    """What the regions of a model have in common.

    They are who reads its parameters; by path, what kernels stored; by quantize operator, the steps that
    kernels put in its place; and, by path, the calls that wrote to the buffers that kernels took over.
    """

    readers: Readers = field(default_factory=dict)
    stored: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: dict[Node, list[Node]] = field(default_factory=dict)
    taken: dict[str, Node] = field(default_factory=dict)


_STORED = "qompose_stored_by_kernel"
"""Key in the meta of nodes that read what a kernel stored: the path that it asked for."""


class Region:
    """One claimed region of a converted graph.

    Names are those of the rule's pattern. Kernels read what they need, call `call` for each operator
    they insert and return the last one; where `output` is not None that one must give its integers.
    `inserted` has the calls so far.
    """

    def __init__(
        self,
        module: GraphModule,
        claim: Claim,
        nodes: Sequence[Node],
        *,
        float_output: bool = False,
        shared: Shared | None = None,
    ) -> None:
        self.module, self.claim = module, claim
        self._shared = shared or Shared()
        self.inserted: list[Node] = []
        self._taken: str | None = None
        self._nodes = {node.name: node for node in nodes}
        self._captures = dict(claim.captures)
        if claim.output not in self._nodes:
            raise InternalError(
                f"the region of rule {claim.rule} at {claim.anchor} lost its output {claim.output}"
            )
        self.output_node = self._nodes[claim.output]
        self.output = None if float_output else self._output()

    def node(self, name: str) -> Node:
        """Return an operator of the region.

        Raises:
            ConfigError: the pattern does not have the name, or it is not an operator of the region.
        """
        found = self._nodes.get(self._captures.get(name, ""))
        if found is None:
            names = sorted(name for name, node in self._captures.items() if node in self._nodes)
            raise self._fault(f"operator {name!r}; the region has {', '.join(names) or 'none'}")
        return found

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return the operators of the region, in the order of the graph."""
        return tuple(self._nodes.values())

    def has(self, name: str) -> bool:
        """Return whether the match has a node for a name."""
        return name in self._captures

    def inputs(self, role: str) -> list[Node]:
        """Return what the region reads for a role, one node for each place, in order.

        Raises:
            ConfigError: the rule has no such role.
        """
        found = [o.read_by(self._nodes[o.user]) for o in self.claim.operands if o.role == role]
        if not found:
            roles = ", ".join(dict.fromkeys(o.role for o in self.claim.operands))
            raise self._fault(f"tensor {role!r}; the region has {roles} and output")
        return found

    def quantized_inputs(self, role: str) -> list[QuantizedTensor]:
        """Return the integers that the region reads for a role.

        Raises:
            NotLowerable: one of them arrives in float.
        """
        return [dequantized(node) for node in self.inputs(role)]

    def quantized(self, role: str) -> QuantizedTensor:
        """Return the integers of the first input of a role, or those that "output" must give.

        Raises:
            NotLowerable: the input arrives in float; the output is wanted in float.
        """
        if role != "output":
            return self.quantized_inputs(role)[0]
        if self.output is None:
            raise NotLowerable("its output is read in float, or has several scales")
        return self.output

    def qparams(self, role: str) -> tuple[Any, ...]:
        """Return scale and zero point of the first input of a role; of "output", its bounds after them.

        Per tensor they are numbers; of a weight with several scales they are nodes.

        Raises:
            NotLowerable: the input arrives in float; the output is wanted in float.
        """
        tensor = self.quantized(role)
        bounds = (tensor.low, tensor.high) if role == "output" else ()
        return (tensor.scale, tensor.zero_point, *bounds)

    def dynamic(self, role: str) -> DynamicTensor:
        """Return how the first input of a role is quantized when the model runs.

        Raises:
            NotLowerable: it arrives in float, or its scale is known beforehand.
        """
        return quantized_at_run_time(self.inputs(role)[0])

    def readers(self, role: str) -> tuple[Claim, ...]:
        """Return the claims whose regions read the same parameter as this one does for a role.

        This region's own is among them. They are those of the converted model, whichever have their kernels
        by now: a kernel that keeps the parameter in a form of its own sees who would need another copy.
        """
        constant = constant_of(self.quantized(role).node)
        known = () if constant is None else self._shared.readers.get(layout_of(constant), ())
        return known or (self.claim,)

    def argument(self, name: str, argument: str) -> Any:
        """Return an argument of an operator by its name in the schema, its default if left out.

        Raises:
            ConfigError: there is no such operator, or it has no such argument.
        """
        node = self.node(name)
        known = arguments_of(node)
        if argument not in known:
            raise self._fault(f"argument {argument!r} of {node.target._schema}")  # type: ignore[union-attr]
        return known[argument]

    def _fault(self, missing: str) -> ConfigError:
        """Return the error of a kernel that asks for what its rule does not have."""
        claim = self.claim
        return ConfigError(
            f"The kernel of {claim.owner}, rule {claim.rule}, at {claim.anchor} requests "
            f"something its region does not have: {missing}"
        )

    def _output(self) -> QuantizedTensor | None:
        """Return the integers that consumers want, if all want the same ones."""
        users = list(self.output_node.users)
        if not users or not all(user.target is qdq.quantize_per_tensor for user in users):
            return None
        if any(user.args[1:] != users[0].args[1:] for user in users):
            return None
        return quantized_by(users[0])

    def call(
        self, target: Callable[..., Any], *args: Any, dtype: torch.dtype | None = None
    ) -> Node:
        """Insert a call at the region's place. `dtype` is that of its value, where not the float output's.

        `target` is an operator, or a function that torch.library.custom_op made one. `lower` refuses a kernel
        whose last call gives another shape than the region, by its fake.
        """
        example = value_of(self.output_node)
        return self._insert(target, args, example if dtype is None else example.to(dtype))

    def step(self, target: Callable[..., Any], *args: Any) -> Node:
        """Insert a call whose value is only a step to the output: its shape and type follow from `args`."""
        return self._insert(target, args, _result(target, args))

    def shared_step(self, role: str, target: Callable[..., Any], *args: Any) -> Node:
        """Insert a `step` once for all regions that read a tensor which is quantized when the model runs.

        It stands where the converted model quantizes the tensor; one that is there already is returned.

        Args:
            role: its first input is the tensor.
            args: literals, the node of `dynamic(role)`, and shared steps of this tensor.

        Raises:
            NotLowerable: the tensor arrives in float, or its scale is known beforehand.
            ConfigError: the operator cannot be called, or an argument is computed after this place.
        """
        self.dynamic(role)
        place = _quantize_behind(self.inputs(role)[0])
        target = self._checked(target, args)
        known = self._shared.steps.setdefault(place, [])
        late = [a.name for a in args if isinstance(a, Node) and not a < place]
        if late:
            raise self._wrong_call(target, f"{', '.join(late)} is computed after {place.name}")
        node = next((n for n in known if n.target is target and n.args == args), None)
        if node is None:
            with place.graph.inserting_before(place):
                node = call(place.graph, target, args, place, _result(target, args))
            known.append(node)
        self.inserted.append(node)
        return node

    def _insert(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Node:
        target = self._checked(target, args)
        with self.module.graph.inserting_before(self.output_node):
            node = call(self.module.graph, target, args, self.output_node, value)
        self.inserted.append(node)
        return node

    def _checked(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return what a graph can call for a function."""
        target = getattr(target, "_opoverload", target)  # a graph of anything else cannot be saved
        fault = _call_fault(target, args)
        if fault:
            raise self._wrong_call(target, fault)
        return target

    def _wrong_call(self, target: Callable[..., Any], fault: str) -> ConfigError:
        who = f"{self.claim.owner}, rule {self.claim.rule}, at {self.claim.anchor}"
        return ConfigError(f"The kernel of {who} calls {target}: {fault}")

    def constant(self, path: str, value: Tensor) -> Node:
        """Store a buffer of any shape, and insert a node that reads it; a `path` that is taken gets a number.

        What a kernel stored before under this path is read again where it is equal.
        """
        value = self._known(path, value)
        target = self._target_of(path, value)
        if target is None:
            target = free_attribute(self.module, path)
            set_attribute(self.module, target, value)
        with self.module.graph.inserting_before(self.output_node):
            node = read_attribute(self.module, target, self.output_node)
        node.meta[_STORED] = path
        return node

    def take_over(self, buffer: Node) -> tuple[str, Tensor]:
        """Let all that read a buffer, to which this region writes, read what the kernel returns instead.

        The kernel keeps what is written in buffers of its own (`state`).

        Returns:
            the path of the buffer, and its initial values in its shape, which are not to be changed.

        Raises:
            NotLowerable: something else writes to the buffer too, or reads it before this region.
        """
        values, reason = constant_of(buffer), why_not_alone(self.output_node, buffer)
        if values is None or reason:
            raise NotLowerable(reason or f"{buffer.name} is not a buffer of the program")
        self._taken = str(buffer.target)
        return self._taken, values

    def state(self, path: str, value: Tensor) -> Node:
        """Store a buffer of any shape that the kernel writes to, and insert a node that reads it.

        Unlike a `constant`, it is never that of another region. The methods of a program share it by its
        path, so that follows from the path of the buffer that it replaces.

        Raises:
            NotLowerable: something else stands at the path.
        """
        if holds(self.module, path):
            raise NotLowerable(f"the program has something else at {path!r}")
        set_attribute(self.module, path, value)
        with self.module.graph.inserting_before(self.output_node):
            return read_attribute(self.module, path, self.output_node)

    def _known(self, path: str, value: Tensor) -> Tensor:
        """Return what was stored under a path before, in any graph of the model, where it is equal."""
        before = self._shared.stored.setdefault(path, [])
        for other in before:
            if other.dtype is value.dtype and torch.equal(other, value):
                return other
        before.append(value)
        return value

    def _target_of(self, path: str, value: Tensor) -> str | None:
        """Return where this graph has a value that was stored under a path."""
        for node in self.module.graph.find_nodes(op="get_attr", sort=False):
            if node.meta.get(_STORED) == path and constant_of(node) is value:
                return str(node.target)
        return None

    def replace(self, replacement: Node) -> None:
        """Put a kernel's node in the place of the region's output, quantize operators included."""
        if self._taken is not None:
            self._shared.taken[self._taken] = self.output_node
            own = {*self._nodes.values(), *self.inserted}
            for node in self.module.graph.find_nodes(op="get_attr", target=self._taken):
                node.replace_all_uses_with(replacement, lambda user: user not in own)
        if self.output is None:
            self.output_node.replace_all_uses_with(replacement)
            return
        for user in list(self.output_node.users):
            user.replace_all_uses_with(replacement)
            self.module.graph.erase_node(user)


def _result(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what a call gives for the examples of its arguments."""
    examples: Any = torch.fx.node.map_arg(args, value_of)
    return result_of(target, *examples)


def _call_fault(target: Any, args: tuple[Any, ...]) -> str:
    """Return why an operator cannot be called with positional arguments, "" where it can."""
    whole = [value for value in args if isinstance(value, (DynamicTensor, QuantizedTensor))]
    if whole:
        return f"tensors must be passed as nodes, got a {type(whole[0]).__name__}; pass its .node"
    if any(isinstance(value, Tensor) for value in pytree.tree_leaves(args)):
        return "tensors must be passed as nodes, got a Tensor; pass region.constant(name, tensor)"
    if not callable(target):
        return "that is no operator or function; pass the function that custom_op made"
    if not isinstance(target, OpOverload):
        return ""
    declared = target._schema.arguments
    missing = [a.name for a in declared[len(args) :] if not a.has_default_value()]
    if missing or len(args) > len(declared):
        what = f"without {', '.join(missing)}" if missing else f"with {len(args)} arguments"
        return f"{what}; its schema is {target._schema}"
    return "; ".join(_misfits(declared, args))


def _misfits(declared: Sequence[Any], args: Sequence[Any]) -> Iterator[str]:
    """Yield the arguments that are vectors where a schema wants numbers, or no tensors where it wants one."""
    for argument, value in zip(declared, args, strict=False):
        kind, tensor = str(argument.type), value_of(value) if isinstance(value, Node) else None
        sizes = tensor.shape if isinstance(tensor, Tensor) else ()
        if kind in _NUMBERS and any(isinstance(size, int) and size > 1 for size in sizes):
            yield f"{argument.name} must be of type {kind}, got {value.name} of shape {[*sizes]}"
        elif kind == "Tensor" and (value is None or isinstance(value, str)):
            yield f"{argument.name} must be the node of a tensor, got {value!r}"


_NUMBERS = frozenset({"float", "int", "bool", "number"})


def readers_in(regions: Mapping[int, Sequence[Node]], claims: Sequence[Claim]) -> Readers:
    """Return the claims that read each quantized parameter, in their order; `regions` are by claim."""
    found: dict[tuple[object, ...], dict[int, Claim]] = defaultdict(dict)
    for number, nodes in sorted(regions.items()):
        for source in (source for node in nodes for source in node.all_input_nodes):
            holder = source.args[0] if qdq.is_dequantize(source) else None
            constant = constant_of(holder) if isinstance(holder, Node) else None
            if constant is not None:
                found[layout_of(constant)][number] = claims[number]
    return {layout: tuple(of_one.values()) for layout, of_one in found.items()}


def dequantized(node: Node) -> QuantizedTensor:
    """Return the integers behind a dequantize operator.

    Raises:
        NotLowerable: the node is something else.
    """
    if not qdq.is_dequantize(node):
        raise NotLowerable(f"its input {node.name} is float")
    if node.target is qdq.dequantize_per_channel:
        source, scale, zero_point, axis, low, high, dtype = node.args[:7]
        return QuantizedTensor(source, scale, zero_point, low, high, dtype, axis)  # type: ignore[arg-type]
    if node.target is qdq.dequantize_per_group:
        return replace(quantized_by(node), group=node.args[6])  # type: ignore[arg-type]
    return quantized_by(node)


def quantized_at_run_time(node: Node) -> DynamicTensor:
    """Return how the tensor behind a dequantize operator is quantized, whose scale the graph computes.

    Raises:
        NotLowerable: the node is something else.
    """
    shaped = node.target is aten.view_as.default
    tensor = dequantized(_dequantize_behind(node))
    chosen = qdq.chooser_of(tensor.scale)
    if chosen is None:
        raise NotLowerable(f"the scale of its input {node.name} is static")
    choose: Any = chosen.target
    source = tensor.node.all_input_nodes[0]  # parameters may be chosen of a cast
    by_token = choose in qdq.CHOOSE_PER_TOKEN
    dims: int | None = 1 if by_token else None
    if shaped:
        source, whole = source.all_input_nodes[0], source
        dims = value_of(source).dim() - value_of(whole).dim() + 1
    symmetric = choose in qdq.CHOOSE_SYMMETRIC
    eps = arguments_of(chosen).get("eps")
    return DynamicTensor(source, dims, symmetric, tensor.low, tensor.high, tensor.dtype, eps)


def _dequantize_behind(node: Node) -> Node:
    """Return what dequantizes an input: of items of several dimensions, it stands behind a view."""
    return node.all_input_nodes[0] if node.target is aten.view_as.default else node


def _quantize_behind(node: Node) -> Node:
    """Return the operator that quantizes an input when the model runs."""
    return dequantized(_dequantize_behind(node)).node


def quantized_by(node: Node) -> QuantizedTensor:
    """Return what a per-tensor quantize (its own value) or dequantize operator (its input) is about."""
    source, scale, zero_point, low, high, dtype = node.args[:6]
    holder = node if qdq.is_quantize(node) else source
    return QuantizedTensor(holder, scale, zero_point, low, high, dtype)  # type: ignore[arg-type]


_RELU = {aten.relu.default, aten.relu_.default}


def on_integers(region: Region) -> Node:
    """Kernel for operators that move values without changing them: the same operator, on the integers.

    Raises:
        NotLowerable: the region's inputs and output do not have one scale and zero point; or the
            operator is not in `SCALE_PRESERVING`.
    """
    output = region.output
    node = region.output_node
    if node.target not in SCALE_PRESERVING:
        raise NotLowerable(f"{node.target} is not a scale-preserving operator")
    if output is None:
        raise NotLowerable("its output is not quantized")
    if output.dtype in NOT_ON_INTEGERS.get(node.target, ()):
        raise NotLowerable(f"torch does not support {node.target} for {output.dtype}")
    sources = {a: dequantized(a) for a in node.all_input_nodes if qdq.is_dequantize(a)}
    if not sources or any(source.qparams != output.qparams for source in sources.values()):
        raise NotLowerable("its input and output do not share quantization parameters")
    if node.target in _RELU:  # zero is where the zero point is
        (source,) = sources.values()
        return region.call(
            aten.clamp_min.default, source.node, source.zero_point, dtype=output.dtype
        )
    args = torch.fx.node.map_arg(node.args, lambda a: sources[a].node if a in sources else a)
    call_node = region.call(node.target, *args, dtype=output.dtype)  # type: ignore[arg-type]
    call_node.kwargs = node.kwargs
    return call_node


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor: the node that holds its integers, and what they mean.

    `value = (integer - zero_point) * scale`. Per tensor, `scale` is a float and `zero_point` an int; per
    channel they are nodes of shape `(C,)`, along dimension `axis`; in groups of `group` integers within the
    rows of a matrix, of shape `(rows, groups)`. `low` and `high` bound the integers.
    """

    node: Node
    scale: Any
    zero_point: Any
    low: int
    high: int
    dtype: torch.dtype
    axis: int | None = None
    group: int | None = None

    @property
    def tensor(self) -> Tensor:
        """Return the integers of a parameter, in its shape.

        Raises:
            NotLowerable: the tensor is computed when the model runs.
        """
        return _constant(self.node)

    @property
    def scales(self) -> Tensor:
        """Return the scale as a float32 tensor, `(C,)` per channel and `(1,)` per tensor; see `group`.

        Raises:
            NotLowerable: it is computed when the model runs.
        """
        return _constant(self.scale) if isinstance(self.scale, Node) else torch.tensor([self.scale])

    @property
    def zero_points(self) -> Tensor:
        """Return the zero point as a tensor, `(C,)` per channel and `(1,)` per tensor; see `group`.

        Raises:
            NotLowerable: it is computed when the model runs.
        """
        if isinstance(self.zero_point, Node):
            return _constant(self.zero_point)
        return torch.tensor([self.zero_point])

    @property
    def qparams(self) -> tuple[Any, ...]:
        """Return all but the node: equal for tensors that may be exchanged."""
        return (self.scale, self.zero_point, self.low, self.high, self.dtype, self.axis, self.group)


@dataclass(frozen=True)
class DynamicTensor:
    """A tensor that is quantized when the model runs, as `Region.dynamic` gives it to a kernel.

    Attributes:
        node: holds its floats.
        dims: one scale is for all of its last `dims` dimensions: 1 is a scale per token; None: for the
            whole tensor.
        symmetric: the zero point is 0.
        low, high: bound the integers.
        dtype: of the integers.
        eps: bounds the scale from below; None: only that it is above 0, in the way of the operator that
            chooses it.
    """

    node: Node
    dims: int | None
    symmetric: bool
    low: int
    high: int
    dtype: torch.dtype
    eps: float | None = None


def _constant(node: Node) -> Tensor:
    constant = constant_of(node)
    if constant is None:
        raise NotLowerable(f"{node.name} is not a parameter")
    return unpacked(constant)  # type: ignore[no-any-return]
