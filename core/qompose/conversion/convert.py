# SPDX-License-Identifier: Apache-2.0
"""`convert_pt2e`: observers become quantize and dequantize, parameters become integers.

Convert: observers become quantize and dequantize operators; parameters become integers.

Every consumer of a quantized tensor reads a dequantize of its own, so that a later partitioner can take
one region without splitting another's. A quantize operator says that it belongs to the module that made
the tensor, a dequantize operator to the one that reads it.

What stays behind in a converted model beside its integers.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from qompose.algorithms.bias_correction import correct_biases
from qompose.conversion.integer_bias import integer_biases
from qompose.conversion.qparams_solver import Estimation, Switch
from qompose.conversion.reference_representation import Representation, represent
from qompose.observers.channel_ranges import INPUT, OUTPUT, base_observer
from qompose.observers.foreign_observer import Delegate, check_graph, is_quantize_affine
from qompose.observers.make_observer import integer_bounds
from qompose.plan.float_operators import state_bytes
from qompose.plan.machine_requirements import requirements_of
from qompose.plan.operator_ids import restore_written
from qompose.plan.plan import Plan, Record, attach, record_of
from qompose.program.control_flow import hoist_constants, name_apart, nodes_in, run_as_exported
from qompose.program.graph import (
    call,
    constant_of,
    copy_graph_module,
    drop_attribute,
    first_user,
    layout_of,
    owner_of,
    paused_collection,
    refresh,
    replace_in_place,
    value_of,
)
from qompose.program.meta import CAST_TAG, CUSTOM_KEY, META_KEY, hand_over, tag
from qompose.reporting.build_report import log_stage, say_if_all_was_dropped, say_if_modes_were_lost
from qompose.spec.claim import clear_annotations
from qompose.spec.qdq import (
    OperatorPair,
    QParams,
    add_buffer,
    choosing_operator,
    dynamic_pair,
    evaluated,
    fold_quantized_constants,
    integers_of,
    read_buffer,
    static_pair,
)
from qompose.spec.qparams import DEFAULT_EPS, along
from qompose.training.qat_conv_bn import deployment_form, is_trained


def convert_pt2e(
    model: GraphModule,
    use_reference_representation: bool = False,
    fold_quantize: bool = True,
    *,
    inplace: bool = False,
    allow_uncalibrated: bool = False,
) -> GraphModule:
    """Replace observers by quantize and dequantize operators, and parameters by integers.

    Args:
        model: what `prepare_pt2e` returned, calibrated, or `prepare_qat_pt2e`, trained. It is left alone.
        use_reference_representation: spell out the integer arithmetic of every operator that has a
            reference, in aten operators (`qompose.conversion.reference_representation`). Such a
            model is not for `lower`.
        fold_quantize: store the integers of parameters; False keeps floats and a quantize operator.
        inplace: turn `model` itself into the result. Float parameters are let go of one by one as they are
            quantized, so that both forms are never held at once.
        allow_uncalibrated: leave regions in float whose observers saw nothing, rather than raise.

    Raises:
        StageError: the model was not prepared.
        UncalibratedError: observers saw no data; the message lists their tensors.
        CalibrationError: a tensor's statistics give no usable scale.
    """
    record = record_of(
        model,
        stages=("prepared",),
        function="convert_pt2e",
        remedy="Call prepare_pt2e, which returns a new model, and calibrate that first.",
    )
    say_if_modes_were_lost(model)
    with paused_collection():
        # One that was trained is folded first, which must not be left behind if anything fails.
        working = model if inplace and not is_trained(model) else copy_graph_module(model)
        deployment_form(working)
        conversion = convert_observers(
            working, record.plan, allow_uncalibrated=allow_uncalibrated, fold_quantize=fold_quantize
        )
        converted = _finished(working, record, conversion, reference=use_reference_representation)
    say_if_all_was_dropped(converted.meta[META_KEY])
    log_stage(converted)
    return replace_in_place(model, converted) if inplace else converted


def _finished(
    model: GraphModule, record: Record, conversion: Conversion, *, reference: bool
) -> GraphModule:
    """Return a module of a graph whose observers are gone, with its record."""
    clear_annotations(model)  # they refer to nodes of the prepared graph
    run_as_exported(model)
    represented = Representation({}, {})
    if reference:
        fold_quantized_constants(model)
        represented = represent(model)
    hoist_constants(model)
    name_apart(model)
    converted = refresh(model)
    restore_written(converted, record.state)
    done = replace(
        record,
        stage="reference" if reference else "converted",
        dropped=conversion.dropped,
        balanced=tuple(conversion.balanced),
        findings=tuple(conversion.findings),
        requirements=requirements_of(record.plan, record.backends, conversion.dropped),
        kernels=_by_claim(record.plan, represented.replaced),
        fallbacks=_by_claim(record.plan, represented.left),
        bytes=state_bytes(converted),
    )
    return attach(converted, done)


def _by_claim(plan: Plan, facts: Mapping[str, str]) -> dict[int, str]:
    """Return what is known of the operators that claims are named after, by the claims' numbers."""
    anchors = {number: claim.anchor for number, claim in enumerate(plan.claims)}
    return {number: facts[name] for number, name in anchors.items() if name in facts}


@dataclass(frozen=True)
class Conversion:
    """What reports say of a conversion.

    `dropped` are claims that were not followed, with the reason; `balanced` describes tensors whose
    channels got factors; `findings` are tensors whose statistics look wrong, and parameters that stay in
    float beside their integers. `switches` are for those who asked for no folding.
    """

    dropped: dict[int, str]
    balanced: list[str]
    findings: list[str]
    switches: list[Switch]


def convert_observers(
    model: GraphModule, plan: Plan, *, allow_uncalibrated: bool, fold_quantize: bool = True
) -> Conversion:
    """Replace all observers of a prepared model, in place; until nothing can fail, leave it alone.

    What other packages' observers do that convert themselves can fail in the middle. A claim
    whose tensor held mask values (infinities, or values near the dtype's largest) is dropped: its region
    stays in float.

    Raises:
        UncalibratedError: an observer saw nothing, and `allow_uncalibrated` is False.
        CalibrationError: a tensor's statistics give no usable scale.
        MemberError: an observer raised an error, or left a program that cannot run.
    """
    estimation = Estimation(model, plan)
    estimation.run(allow_uncalibrated=allow_uncalibrated)
    estimation.factoring.settle()
    corrected = correct_biases(model, plan, estimation)
    converter = _Converter(model, plan, estimation, fold_quantize=fold_quantize)
    findings = [*estimation.findings(), *corrected.refused]
    converter.replace_all()
    findings += converter.delegated
    findings += kept_in_float(model, converter.quantized) if fold_quantize else []
    made = [*estimation.factoring.described(), *corrected.made]
    return Conversion(estimation.dropped, made, findings, estimation.switches)


_to = torch.ops.aten.to.dtype
_flatten, _view_as = torch.ops.aten.flatten.using_ints, torch.ops.aten.view_as.default
_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8}
"""How many integers in a row a type holds: where there are more, they are read as float32 first."""


class _Converter:
    def __init__(
        self, model: GraphModule, plan: Plan, estimation: Estimation, *, fold_quantize: bool
    ) -> None:
        self.model, self.plan, self.estimation = model, plan, estimation
        self.fold_quantize = fold_quantize
        self.zeros: dict[tuple[int, ...], Tensor] = {}
        self.integers: dict[tuple[Any, ...], Tensor] = {}
        self.paths: dict[tuple[int, int], str] = {}  # (module, tensor) -> where it stands
        self.readers = Counter(
            (id(owner_of(n)), n.target) for n in nodes_in(model) if n.op == "get_attr"
        )
        self.quantized: dict[str, str] = {}  # parameters that have integers now -> one reader
        self.delegated: list[str] = []  # what observers did that converted themselves

    def replace_all(self) -> None:
        """Replace every observer node."""
        kinds: dict[Graph, list[str]] = defaultdict(list)
        for node, number in self.estimation.sites:
            if node._erased:  # an observer that converts itself removed what nothing reads
                continue
            (value,) = node.all_input_nodes
            for user in list(node.users):
                if not self.estimation.reads_quantized(node, user, number):
                    user.replace_input_with(node, value)
            if node.users and self.estimation.converts_itself(number):
                kinds[node.graph].append(type(self.estimation.observer(number)).__name__)
                self._delegate(node, number)
            else:
                self._replace(node, value, number)
                node.graph.erase_node(node)
            self._release(value)
        for graph, names in kinds.items():
            check_graph(graph, names)
        for node, reader, rounded in integer_biases(
            self.model, self.plan, self.estimation.qparams, self.estimation.dropped
        ):
            with node.graph.inserting_before(node):
                own = self._buffer(f"{node.target}_rounded", rounded, reader)
            reader.replace_input_with(node, own)
            self.estimation.note_bias(reader, own, node)
            self._release(node)

    def _replace(self, node: Node, value: Node, number: int) -> None:
        spec: Any = self.plan.groups[number].spec
        if node.users and spec.dtype.is_floating_point:
            self._cast(node, value, spec.dtype)
        elif node.users and getattr(spec, "is_dynamic", False):
            self._dynamic(node, value, number, spec)
        elif node.users:
            self._static(node, value, number)

    def _delegate(self, node: Node, number: int) -> None:
        """Leave a node to its observer."""
        delegate = Delegate(node, self.estimation.describe(number))
        isolated = delegate.isolate()
        value, reader, readers = delegate.value, first_user(node).name, list(node.users)
        self.readers[id(owner_of(value)), value.target] += isolated
        made = delegate.convert()
        for user, read in ((u, m) for m in made for u in readers if m in u.all_input_nodes):
            self.estimation.note(node, user, read, value)
        if value.op == "get_attr" and delegate.followed:
            self.quantized[str(value.target)] = reader
        for new in made:
            if self.fold_quantize and is_quantize_affine(new):
                self._fold(new, value, number)
        self.delegated += delegate.findings
        if isolated:
            self._release(value)

    def _fold(self, node: Node, value: Node, number: int) -> None:
        """Store what a node makes of a parameter; a parameter read in several places is stored once."""
        constant, integers = constant_of(value), evaluated(node)
        if constant is None or integers is None:
            return
        integers = self.integers.setdefault((layout_of(constant), number, "delegated"), integers)
        with node.graph.inserting_before(node):
            read = self._buffer(f"{value.target}_q", integers, first_user(node))
        node.replace_all_uses_with(read)
        node.graph.erase_node(node)

    def _static(self, node: Node, value: Node, number: int) -> None:
        factoring = self.estimation.factoring
        balance, factors = self.plan.groups[number].balance, factoring.factors.get(number)
        q, constant = self.estimation.qparams[number], constant_of(value)
        pair = self._pair(node, value, q)
        if constant is not None and self.fold_quantize:
            quantized = self._folded(node, value, constant, number)
        elif constant is not None:
            factoring.store_constants([value.name])
            quantized = self._quantized(node, value, pair)
        else:
            value = self._divided(value, number, before=node)
            quantized = self._quantized(node, value, pair)
        rescale = None
        if factors is not None and balance is not None and balance.side == OUTPUT:
            rescale = (factors.values, balance.dim)
        self._dequantize_for_each_user(node, quantized, pair, value, rescale)

    def _pair(self, node: Node, value: Node, q: QParams) -> OperatorPair:
        shape = tuple(value_of(value).shape)
        if q.per_tensor:
            return static_pair(q, shape, float(q.scale), int(q.zero_point))
        base, like = _base(value), first_user(node)
        with node.graph.inserting_before(node):
            scale = self._buffer(f"{base}_scale", q.scale, like)
            if bool(q.zero_point.any()):
                zero_point = self._buffer(f"{base}_zero_point", q.zero_point, like)
            else:
                zero_point = self._zero(q.zero_point, like)
        return static_pair(q, shape, scale, zero_point)

    def _zero(self, like_values: Tensor, like: Node) -> Node:
        """Read the one zero tensor of a shape: symmetric weights need one, and it is always the same."""
        shape = tuple(like_values.shape)
        zeros = self.zeros.setdefault(shape, torch.zeros(shape, dtype=torch.int64))
        return self._buffer("zero_point_" + "x".join(map(str, shape)), zeros, like)

    def _buffer(self, path: str, value: Tensor, like: Node) -> Node:
        """Read a buffer; one that the module holds already is not stored again."""
        key = (id(owner_of(like)), id(value))
        if key in self.paths:
            return read_buffer(self.paths[key], like)
        read = add_buffer(path, value, like)
        self.paths[key] = str(read.target)
        return read

    def _quantized(self, node: Node, value: Node, pair: OperatorPair) -> Node:
        example = value_of(value).to(pair.dtype)
        maker = value if value.op == "call_function" else first_user(node)
        with node.graph.inserting_before(node):
            return _call(pair.quantize, (value, *pair.arguments), maker, example)

    def _folded(self, node: Node, value: Node, constant: Tensor, number: int) -> Node:
        """Quantize a parameter now. Its name stays its module path, with `_q` behind it.

        A table that is read in several places, under whatever names, is stored once.
        """
        key = (layout_of(constant), number)
        if key not in self.integers:
            with torch.no_grad():
                self.integers[key] = integers_of(
                    constant,
                    self.estimation.qparams[number],
                    self.estimation.factoring.absorbed(value.name),
                )
        reader = first_user(node)
        self.quantized[str(value.target)] = reader.name
        with node.graph.inserting_before(node):
            return self._buffer(f"{value.target}_q", self.integers[key], reader)

    def _release(self, value: Node) -> None:
        """Let go of a parameter that nothing reads any more: peak memory is not to hold both forms."""
        if value.op != "get_attr" or value.users or not self.fold_quantize:
            return
        owner, target = owner_of(value), str(value.target)
        if not value._erased:
            value.graph.erase_node(value)
        self.readers[id(owner), target] -= 1
        if not self.readers[id(owner), target]:
            drop_attribute(owner, target)

    def _divided(self, value: Node, number: int, *, before: Node) -> Node:
        """Divide an input by the factors of its channels, where what makes it has not done so."""
        balance = self.plan.groups[number].balance
        factors = self.estimation.factoring.factors.get(number)
        if factors is None or balance is None or balance.side != INPUT or balance.absorbers:
            return value
        return self._scaled(value, 1 / factors.values, balance.dim, before=before)

    def _scaled(self, value: Node, vector: Tensor, dim: int, *, before: Node) -> Node:
        """Multiply each channel of a float tensor by a number of its own."""
        example = value_of(value)
        vector = along(vector, dim, example.dim()).to(example.dtype)
        with before.graph.inserting_before(before):
            factors = add_buffer(f"{_base(value)}_factors", vector, before)
            return _call(torch.ops.aten.mul.Tensor, (value, factors), before, example)

    def _dynamic(self, node: Node, value: Node, number: int, spec: Any) -> None:
        observer = self.estimation.observer(number)
        low, high = integer_bounds(spec, observer)
        eps = float(getattr(base_observer(observer), "eps", DEFAULT_EPS))
        value = self._divided(value, number, before=node)
        choose, arguments = choosing_operator(spec, low, high, eps)
        reader, shaped = first_user(node), None
        if len(spec.block_size or ()) > 1:  # torch's operators know scales per token alone
            shaped, whole = value, value_of(value)
            first = whole.dim() - len(spec.block_size)
            with node.graph.inserting_before(node):
                value = _call(_flatten, (value, first), reader, whole.flatten(first))
        example = choose(value_of(value), *arguments)
        with node.graph.inserting_before(node):
            chosen = _call(choose, (value, *arguments), reader, example)
            scale, zero_point = (
                _call(operator.getitem, (chosen, i), reader, example[i]) for i in (0, 1)
            )
        pair = dynamic_pair(spec, low, high, scale, zero_point)
        quantized = self._quantized(node, value, pair)
        self._dequantize_for_each_user(node, quantized, pair, value, None, shaped)

    def _cast(self, node: Node, value: Node, dtype: torch.dtype) -> None:
        """Store or compute a tensor in a smaller float type, and read it in its own."""
        example, constant, reader = value_of(value), constant_of(value), first_user(node)
        with node.graph.inserting_before(node):
            if constant is not None and self.fold_quantize:
                small = self._buffer(f"{value.target}_half", constant.detach().to(dtype), reader)
            else:
                small = _cast_to(value, dtype, reader, example)
        for user in list(node.users):
            reader = user if user.op == "call_function" else small
            with node.graph.inserting_before(user):
                read = _cast_to(small, example.dtype, reader, example)
            if value.op == "get_attr":
                hand_over(value, read)
            self.estimation.note(node, user, read, value)
            user.replace_input_with(node, read)

    def _dequantize_for_each_user(
        self,
        node: Node,
        quantized: Node,
        pair: OperatorPair,
        value: Node,
        rescale: tuple[Tensor, int] | None,
        shaped: Node | None = None,
    ) -> None:
        example = value_of(value)
        exact = pair.steps <= _EXACT.get(example.dtype, 2**24)
        arguments, keywords = pair.to_float(example.dtype if exact else torch.float32)
        for user in list(node.users):
            reader = user if user.op == "call_function" else quantized
            with node.graph.inserting_before(user):
                read = _call(pair.dequantize, (quantized, *arguments), reader, example)
            read.kwargs = keywords
            self.estimation.note(node, user, read, value)
            if not exact and example.dtype is not torch.float32:
                read.meta["val"] = example.to(torch.float32)
                with node.graph.inserting_before(user):
                    read = _cast_to(read, example.dtype, reader, example)
            if shaped is not None:
                with node.graph.inserting_before(user):
                    read = _call(_view_as, (read, shaped), reader, value_of(shaped))
            if rescale is not None:
                read = self._scaled(read, *rescale, before=user)
            if value.op == "get_attr":  # the only trace of its floats
                hand_over(value, read)
            user.replace_input_with(node, read)


def _call(target: Callable[..., Any], args: tuple[Any, ...], like: Node, value: Any) -> Node:
    """Insert a call that belongs to `like`'s module; it is no part of `like`'s claim."""
    node = call(like.graph, target, args, like, value)
    custom = {k: v for k, v in (node.meta.get("custom") or {}).items() if k != CUSTOM_KEY}
    node.meta.pop("custom", None)
    if custom:
        node.meta["custom"] = custom
    return node


def _cast_to(value: Node, dtype: torch.dtype, like: Node, example: Any) -> Node:
    """Insert a cast, which says of itself that it is none of the program's own."""
    cast = _call(_to, (value, dtype), like, example.to(dtype))
    tag(cast, **{CAST_TAG: True})
    return cast


def _base(node: Node) -> str:
    """Return a name for what belongs to a value, free of the numbers that fx adds."""
    return str(node.target) if node.op == "get_attr" else node.name


def kept_in_float(model: GraphModule, quantized: Mapping[str, str]) -> list[str]:
    """Name the parameters that are stored as floats beside their integers, and who reads those.

    Args:
        quantized: the parameters that have integers, each with a reader of these.
    """
    return [
        f"{node.target} stays in float beside its integers ({quantized[str(node.target)]} "
        f"reads those): {', '.join(user.name for user in node.users)} "
        f"{'is' if len(node.users) == 1 else 'are'} not quantized"
        for node in nodes_in(model)
        if node.op == "get_attr" and node.users and str(node.target) in quantized
    ]
