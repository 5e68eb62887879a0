# SPDX-License-Identifier: Apache-2.0
"""`convert_pt2e`: observers become quantize and dequantize operators, parameters become integers.

Every consumer of a quantized tensor reads a dequantize of its own, so that a later partitioner can take
one region without splitting another's. A quantize operator says that it belongs to the module that made
the tensor, a dequantize operator to the one that reads it.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import Factors, commit_factors
from qompose.conversion.qparams_solver import Observed, Solution, solve
from qompose.conversion.reference_representation import Representation, represent
from qompose.errors import ConfigError
from qompose.observers.channel_ranges import INPUT, OUTPUT, base_observer
from qompose.observers.foreign_observer import Delegate, check_graph, is_quantize_affine
from qompose.observers.input_sums import input_observers
from qompose.observers.make_observer import integer_bounds
from qompose.plan.float_operators import state_bytes
from qompose.plan.methods import each_method, share_constants, states_of
from qompose.plan.operator_ids import note_regions, restore_written
from qompose.plan.plan import Plan, Record, attach, record_of, requirements_of
from qompose.program.call_signature import check_dtypes
from qompose.program.control_flow import hoist_constants, name_apart, nodes_in, run_as_exported
from qompose.program.disk import do_ahead, kept, spools
from qompose.program.graph import (
    call,
    constant_of,
    copy_graph_module,
    drop_attribute,
    first_user,
    layout_of,
    one_thread_at_a_time,
    owner_of,
    refresh,
    replace_in_place,
    set_attribute,
    value_of,
)
from qompose.program.meta import (
    CAST_TAG,
    META_KEY,
    QUANTIZATION_TAG,
    clear_origin,
    give_source,
    hand_over,
    tag,
)
from qompose.reporting.build_report import log_stage, say_if_all_was_dropped, say_if_modes_were_lost
from qompose.spec.claim import Point, forget_specifications
from qompose.spec.qdq import (
    OperatorPair,
    QParams,
    add_buffer,
    choosing_operator,
    convert_without_fusing,
    dynamic_pair,
    evaluated,
    fold_computed_values,
    fold_quantized_constants,
    integers_of,
    is_quantize,
    per_group,
    read_buffer,
    static_pair,
)
from qompose.spec.qparams import CASTS, DEFAULT_EPS, UNIT_SCALE, AllowUncalibrated, along
from qompose.training.qat_conv_bn import deployment_form
from qompose.training.train_eval import is_trained


@overload
def convert_pt2e(
    model: GraphModule,
    use_reference_representation: bool = False,
    fold_quantize: bool = True,
    *,
    inplace: bool = False,
    allow_uncalibrated: AllowUncalibrated = False,
) -> GraphModule: ...


@overload
def convert_pt2e(
    model: Mapping[str, GraphModule],
    use_reference_representation: bool = False,
    fold_quantize: bool = True,
    *,
    inplace: bool = False,
    allow_uncalibrated: AllowUncalibrated = False,
) -> dict[str, GraphModule]: ...


def convert_pt2e(
    model: GraphModule | Mapping[str, GraphModule],
    use_reference_representation: bool = False,
    fold_quantize: bool = True,
    *,
    inplace: bool = False,
    allow_uncalibrated: AllowUncalibrated = False,
) -> GraphModule | dict[str, GraphModule]:
    """Replace observers with quantize and dequantize operators, and parameters with integers.

    Args:
        model: a calibrated result of `prepare_pt2e`, or a trained one of `prepare_qat_pt2e`. It is left
            unchanged. Parameters that stay in float are the same tensors in both, and in the model that was
            exported: writing to one in place changes it in all. Integers and scales are new. A dict converts
            the methods of one program, which share state and equal constants.
        use_reference_representation: write out the integer arithmetic of every operator that has a
            reference, in aten operators (`qompose.conversion.reference_representation`). Such a
            model cannot be lowered.
        fold_quantize: store the integers of parameters. False keeps floats and a quantize operator, except
            for weights whose integers an algorithm chose.
        inplace: turn `model` itself into the result. Float parameters are freed one by one as they are
            quantized, so that both forms are never held at once.
        allow_uncalibrated: leave regions whose observers saw no data in float instead of raising. With
            "unit_scale" they are quantized with a scale of 1, to look at graphs, kernels and times before
            there is data: a `QomposeWarning` and the report name the tensors, and what the model computes
            means nothing. Tensors stay in float if they have a scale per channel and their number of
            channels is open, or if their observer, of another package, replaces its own nodes.

    Raises:
        StageError: the model was not prepared.
        ConfigError: `allow_uncalibrated` is another word.
        UncalibratedError: observers saw no data; the message lists their tensors.
        CalibrationError: a tensor's statistics give no usable scale.
    """
    if not isinstance(allow_uncalibrated, bool) and allow_uncalibrated != UNIT_SCALE:
        raise ConfigError(
            f"allow_uncalibrated must be False, True or {UNIT_SCALE!r}, got {allow_uncalibrated!r}"
        )
    options = (use_reference_representation, fold_quantize, inplace, allow_uncalibrated)
    if isinstance(model, Mapping):
        methods = each_method(model, "convert_pt2e", lambda each: _converted(each, *options))
        share_constants(methods, states_of(methods))
        return methods
    return _converted(model, *options)


@one_thread_at_a_time
def _converted(
    model: GraphModule,
    reference: bool,
    fold_quantize: bool,
    inplace: bool,
    allow_uncalibrated: AllowUncalibrated,
) -> GraphModule:
    record = record_of(
        model,
        stages=("prepared",),
        function="convert_pt2e",
        remedy="Call prepare_pt2e, which returns a new model, and calibrate that model first.",
    )
    say_if_modes_were_lost(model)
    # A model that was trained is folded first, which must not be left behind if anything fails.
    working = model if inplace and not is_trained(model) else copy_graph_module(model)
    deployment_form(working)
    with _in_own_types():
        solution = solve(working, record.plan, allow_uncalibrated=allow_uncalibrated)
        inserted = insert_qdq(working, record.plan, solution, fold_quantize=fold_quantize)
    if fold_quantize:
        fold_computed_values(working, {n for c in record.plan.claims for n in c.nodes})
    findings = (*solution.findings, *inserted.findings)
    solved = replace(
        record, dropped=solution.dropped, balanced=tuple(solution.made), findings=findings
    )
    converted = _finished(working, solved, reference=reference)
    say_if_all_was_dropped(converted.meta[META_KEY])
    log_stage(converted)
    return replace_in_place(model, converted) if inplace else converted


def quantized_draft(prepared: GraphModule) -> tuple[Calibrated, GraphModule]:
    """Return a calibrated program as algorithms find it, and what conversion would make of it by now.

    That one quantizes its parameters whenever it runs, and shares them with the prepared program, which is
    left alone. Operators have the same names in both.

    Raises:
        UncalibratedError, CalibrationError: as for `convert_pt2e`.
    """
    plan = prepared.meta[META_KEY].plan
    observed, draft = copy_graph_module(prepared), copy_graph_module(prepared)
    with _in_own_types():
        found = solve(observed, plan, allow_uncalibrated=False, unlearned=True).found
        solution = solve(draft, plan, allow_uncalibrated=False, unlearned=True)
        insert_qdq(draft, plan, solution, fold_quantize=False)
    _sink_parameters(draft)
    run_as_exported(draft)
    return found, refresh(draft)


def _sink_parameters(model: GraphModule) -> None:
    """Quantize parameters, in place, right before they are read, so that few integers are held at a time."""
    places = {node: place for place, node in enumerate(model.graph.nodes)}
    for node in reversed(list(model.graph.nodes)):
        if is_quantize(node) and node.users and constant_of(node.all_input_nodes[0]) is not None:
            min(node.users, key=places.__getitem__).prepend(node)


@contextmanager
def _in_own_types() -> Iterator[None]:
    """Compute as if there were neither autocast nor another default type, which would change integers."""
    default = torch.get_default_dtype()
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _finished(model: GraphModule, record: Record, *, reference: bool) -> GraphModule:
    """Return the module of a graph whose observers are gone, with its record."""
    forget_specifications(model)
    run_as_exported(model)
    represented = Representation({}, {})
    if reference:
        fold_quantized_constants(model)
        represented = represent(model)
    hoist_constants(model)  # the one form of bodies that torch saves and exports
    name_apart(model)  # what was inserted into a body has a name that may be another body's too
    plan = record.plan
    note_regions(
        model,
        {n: claim for n, claim in enumerate(plan.claims) if n not in record.dropped},
        {owner: backend.name for owner, backend in record.backends.items()},
        record.fingerprint,
    )
    check_dtypes(model)
    converted = refresh(model)  # the code of the new graph, without the state that nothing reads
    restore_written(converted, record.state)
    done = replace(
        record,
        stage="reference" if reference else "converted",
        requirements=requirements_of(record.plan, record.backends, record.dropped),
        kernels=_by_claim(record.plan, represented.replaced),
        fallbacks=_by_claim(record.plan, represented.left),
        bytes=state_bytes(converted),
        file_bytes=state_bytes(converted, in_file=True),
    )
    return attach(converted, done)


def _by_claim(plan: Plan, facts: Mapping[str, str]) -> dict[int, str]:
    """Return what is known of the operators that claims are named after, by the claims' numbers."""
    anchors = {number: claim.anchor for number, claim in enumerate(plan.claims)}
    return {number: facts[name] for number, name in anchors.items() if name in facts}


@dataclass(frozen=True)
class FloatAlternative:
    """A node that gives one reader a tensor as quantization leaves it, and what it would read in float.

    Giving that reader the value of `source` instead switches the tensor's quantization off.

    Attributes:
        node: what is read.
        source: what was quantized: a parameter, or a value that stands before `node`. It is there in a model
            that keeps its float parameters.
        claims: numbers of the claims for whose sake `node` is read.
        tensor: name of the value in the prepared program.
    """

    node: Node
    source: Node
    claims: frozenset[int]
    tensor: str


@dataclass(frozen=True)
class Inserted:
    """What became of a graph: lines for the report, and what could be read in float again."""

    findings: tuple[str, ...]
    alternatives: tuple[FloatAlternative, ...]


def insert_qdq(
    model: GraphModule, plan: Plan, solution: Solution, *, fold_quantize: bool
) -> Inserted:
    """Replace all observers of a prepared model by what they stand for, in place.

    Raises:
        MemberError: an observer that converts itself raised an error, or left a program that cannot run.
    """
    inserter = _QDQInserter(plan, solution, model, fold_quantize=fold_quantize)
    inserter.give_parameters_factors()
    for node, _, _ in input_observers(model):
        node.graph.erase_node(node)
    inserter.quantize_ahead()
    inserter.replace_observers()
    inserter.divide_inputs()
    inserter.round_biases()
    copies = float_copies(model, inserter.quantized) if fold_quantize else []
    return Inserted((*inserter.delegated, *copies), tuple(inserter.alternatives))


_to = torch.ops.aten.to.dtype
_flatten, _view_as = torch.ops.aten.flatten.using_ints, torch.ops.aten.view_as.default
_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8}
"""How many integers in a row a type holds: where there are more, they are read as float32 first."""


class _QDQInserter:
    """Puts quantize and dequantize operators in the place of observers, in place.

    Attributes:
        quantized: parameters that have integers now, each with one of their readers.
        delegated: what there is to say of observers that converted themselves.
        alternatives: what readers were given, and in place of what.
    """

    def __init__(
        self, plan: Plan, solution: Solution, model: GraphModule, *, fold_quantize: bool
    ) -> None:
        self.model, self.plan, self.solution = model, plan, solution
        self.fold_quantize = fold_quantize
        self.quantized: dict[str, str] = {}
        self.delegated: list[str] = []
        self.alternatives: list[FloatAlternative] = []
        self._zeros: dict[tuple[int, ...], Tensor] = {}
        self._integers: dict[tuple[Any, ...], Tensor] = {}
        self._paths: dict[tuple[int, int], str] = {}  # (module, tensor) -> where it stands
        self._annotated = {spec.point for claim in plan.claims for spec in claim.specs}
        self._readers = Counter(
            (id(owner_of(n)), n.target) for n in nodes_in(model) if n.op == "get_attr"
        )

    def give_parameters_factors(self) -> None:
        """Store the parameters that have other values now; weights take up factors as they are folded."""
        factors = self.solution.factors
        commit_factors(factors)
        changed = dict(self.solution.parameters)
        if not self.fold_quantize:
            changed.update({n: factors.constant(n) for n in factors.taken_up if n not in changed})
        for name, value in changed.items():
            node = factors.nodes[name]
            set_attribute(owner_of(node), str(node.target), value)

    def replace_observers(self) -> None:
        """Replace every observer node."""
        kinds: dict[Graph, list[str]] = defaultdict(list)
        for observed in self.solution.observed:
            node, number = observed.node, observed.group
            if node._erased:  # an observer that converts itself removed what nothing reads
                continue
            (value,) = node.all_input_nodes
            for user in list(node.users):
                if not self.solution.claims_reading(observed, user):
                    user.replace_input_with(node, value)
            if node.users and number in self.solution.delegated:
                kinds[node.graph].append(type(self.solution.observers[number]).__name__)
                self._delegate(observed)
            else:
                self._replace(observed, value)
                node.graph.erase_node(node)
            self._release(value)
        for graph, names in kinds.items():
            check_graph(graph, names)

    def divide_inputs(self) -> None:
        """Divide float tensors for the operators that read them with factors."""
        nodes = {node.name: node for node in nodes_in(self.model)}
        for divided in self.solution.factors.divided.values():
            readers = [nodes[name] for name in divided.users if not divided.absorbers]
            for read, users in _by_input(readers).items():
                scaled = self._scaled(read, 1 / divided.values, divided.dim, before=users[0])
                for user in users:
                    user.replace_input_with(read, scaled)

    def round_biases(self) -> None:
        """Give every operator whose kernel adds an integer bias the values that those integers stand for."""
        nodes = {node.name: node for node in nodes_in(self.model)}
        for number, rounded in self.solution.biases.items():
            claim = self.plan.claims[number]
            node = nodes.get(claim.bias.name) if claim.bias is not None else None
            if node is None:  # an observer that converts itself removed it
                continue
            readers = [user for user in node.users if user.name in claim.nodes]
            for reader in readers:
                with node.graph.inserting_before(node):
                    own = self._buffer(f"{node.target}_rounded", rounded, reader)
                reader.replace_input_with(node, own)
                alternative = FloatAlternative(own, node, frozenset({number}), node.name)
                self.alternatives.append(alternative)
            if readers:
                self._release(node)

    def _note(self, observed: Observed, user: Node, read: Node, source: Node) -> None:
        claims = self.solution.claims_reading(observed, user)
        self.alternatives.append(FloatAlternative(read, source, claims, observed.tensor))

    def _replace(self, observed: Observed, value: Node) -> None:
        spec: Any = self.plan.groups[observed.group].spec
        if not observed.node.users:
            return
        if spec.dtype in CASTS:
            self._cast(observed, value, spec.dtype)
        elif getattr(spec, "is_dynamic", False):
            self._dynamic(observed, value, spec)
        else:
            self._static(observed, value)

    def _delegate(self, observed: Observed) -> None:
        """Let an observer convert its own node."""
        node, number = observed.node, observed.group
        delegate = Delegate(node, self.solution.delegated[number])
        isolated = delegate.isolate()
        value, reader, readers = delegate.value, first_user(node).name, list(node.users)
        self._readers[id(owner_of(value)), value.target] += isolated
        made = delegate.convert()
        for user, read in ((u, m) for m in made for u in readers if m in u.all_input_nodes):
            self._note(observed, user, read, value)
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
        integers = self._integers.setdefault((layout_of(constant), number, "delegated"), integers)
        with node.graph.inserting_before(node):
            read = self._buffer(f"{value.target}_q", integers, first_user(node))
        node.replace_all_uses_with(read)
        node.graph.erase_node(node)

    def _static(self, observed: Observed, value: Node) -> None:
        node, number = observed.node, observed.group
        balance, factors = self.plan.groups[number].balance, self._factors_of(number)
        q, constant = self.solution.qparams[number], constant_of(value)
        pair = self._pair(node, value, q)
        if constant is not None and (self.fold_quantize or number in self.solution.integers):
            quantized = self._folded(node, value, constant, number)
        else:
            value = value if constant is not None else self._divided(value, number, before=node)
            maker = value if value.op == "call_function" else first_user(node)
            quantized = self._quantized(node, value, pair, maker)
        rescale = None
        if factors is not None and balance is not None and balance.side == OUTPUT:
            rescale = (factors.values, balance.dim)
        self._dequantize_for_each_user(observed, quantized, pair, value, rescale)

    def _factors_of(self, number: int) -> Factors | None:
        return self.solution.factors.factors.get(number)

    def _pair(self, node: Node, value: Node, q: QParams) -> OperatorPair:
        shape = tuple(value_of(value).shape)
        if q.per_tensor:
            return static_pair(q, shape, float(q.scale), int(q.zero_point))
        base, like = _base(value), first_user(node)
        with node.graph.inserting_before(node):
            scale = self._buffer(f"{base}_scale", q.scale, like)
            if bool(q.zero_point.any()):
                stored = kept(f"zero {node.name}", lambda: {"points": _stored(q, shape)})
                zero_point = self._buffer(f"{base}_zero_point", stored["points"], like)
            else:
                zero_point = self._zero(q.zero_point, like)
        return static_pair(q, shape, scale, zero_point)

    def _zero(self, like_values: Tensor, like: Node) -> Node:
        """Read the one zero tensor of a shape, which all symmetric weights of that shape share."""
        shape = tuple(like_values.shape)
        zeros = self._zeros.setdefault(shape, torch.zeros(shape, dtype=torch.int64))
        return self._buffer("zero_point_" + "x".join(map(str, shape)), zeros, like)

    def _buffer(self, path: str, value: Tensor, like: Node) -> Node:
        """Read a buffer; one that the module holds already is not stored again."""
        key = (id(owner_of(like)), id(value))
        if key in self._paths:
            return read_buffer(self._paths[key], like)
        read = add_buffer(path, value, like)
        self._paths[key] = str(read.target)
        return read

    def _quantized(self, node: Node, value: Node, pair: OperatorPair, maker: Node) -> Node:
        # A parameter's value is real: what is made of it when the program runs is not to be held here.
        like = value_of(value)
        example = like.to(pair.dtype)
        if constant_of(value) is not None and like.numel():
            example = like.new_zeros((), dtype=pair.dtype).expand(like.shape)
        with node.graph.inserting_before(node):
            # Where integers are read as float32, so are the values: tools expect one type around a pair.
            wide = constant_of(value) is None and pair.steps > _EXACT.get(like.dtype, math.inf)
            read = _cast_to(value, torch.float32, maker, like) if wide else value
            quantized = _call(pair.quantize, (read, *pair.arguments), maker, example)
        give_source(value, quantized)
        self._port_tag(Point(value.name), value, quantized)
        return quantized

    def _port_tag(self, point: Point, operator: Node, made: Node) -> None:
        """Put a node into an operator's partition, if the point has a specification of that operator."""
        if point in self._annotated and QUANTIZATION_TAG in operator.meta:
            made.meta[QUANTIZATION_TAG] = operator.meta[QUANTIZATION_TAG]

    def _folded(self, node: Node, value: Node, constant: Tensor, number: int) -> Node:
        """Quantize a parameter now. Its name stays its module path, with `_q` behind it.

        A table that is read in several places, under whatever names, is stored once.
        """
        key = (layout_of(constant), number)
        if number in self.solution.integers:
            self._integers[key] = self.solution.integers[number]
        elif key not in self._integers:
            job = partial(self._integers_of, value.name, constant, number)
            self._integers[key] = kept(_named(value, number), job)["integers"]
        reader = first_user(node)
        self.quantized[str(value.target)] = reader.name
        with node.graph.inserting_before(node):
            read = self._buffer(f"{value.target}_q", self._integers[key], reader)
        if QUANTIZATION_TAG in value.meta:
            read.meta[QUANTIZATION_TAG] = value.meta[QUANTIZATION_TAG]
        return read

    def _integers_of(self, name: str, constant: Tensor, number: int) -> dict[str, Tensor]:
        with torch.no_grad():
            q, absorbed = self.solution.qparams[number], self.solution.absorbed(name)
            return {"integers": integers_of(constant, q, absorbed)}

    def quantize_ahead(self) -> None:
        """Quantize parameters, if what is made of them is kept on disk; processes share the work."""
        if not spools():
            return
        jobs, done = {}, set()
        for each in self.solution.observed:
            (value,) = each.node.all_input_nodes
            constant, number = constant_of(value), each.group
            if constant is None or number not in self.solution.qparams or not self.fold_quantize:
                continue
            if each.node.users and number not in self.solution.integers:
                key = (layout_of(constant), number)
                if key not in done:
                    done.add(key)
                    job = partial(self._integers_of, value.name, constant, number)
                    jobs[_named(value, number)] = job
        do_ahead("quantizing weights", jobs)

    def _release(self, value: Node) -> None:
        """Drop a parameter that nothing reads any more, so that both forms are never held at once."""
        if value.op != "get_attr" or value.users or not self.fold_quantize:
            return
        owner, target = owner_of(value), str(value.target)
        if not value._erased:
            value.graph.erase_node(value)
        self._readers[id(owner), target] -= 1
        if not self._readers[id(owner), target]:
            drop_attribute(owner, target)

    def _divided(self, value: Node, number: int, *, before: Node) -> Node:
        """Divide an input by the factors of its channels, where what makes it has not done so."""
        balance, factors = self.plan.groups[number].balance, self._factors_of(number)
        if factors is None or balance is None or balance.side != INPUT:
            return value
        if balance.absorbers or number in self.solution.factors.absorbers:
            return value
        return self._scaled(value, 1 / factors.values, balance.dim, before=before)

    def _scaled(self, value: Node, vector: Tensor, dim: int, *, before: Node) -> Node:
        """Multiply each channel of a float tensor by a number of its own."""
        example = value_of(value)
        vector = along(vector, dim, example.dim()).to(example.dtype)
        with before.graph.inserting_before(before):
            factors = add_buffer(f"{_base(value)}_factors", vector, before)
            return _call(torch.ops.aten.mul.Tensor, (value, factors), before, example)

    def _dynamic(self, observed: Observed, value: Node, spec: Any) -> None:
        node, number = observed.node, observed.group
        observer = self.solution.observers[number]
        low, high = integer_bounds(spec, observer)
        value, reader, shaped = self._divided(value, number, before=node), first_user(node), None
        eps = float(getattr(base_observer(observer), "eps", DEFAULT_EPS))
        if len(spec.block_size or ()) > 1:  # torch's operators know scales per token alone
            shaped, whole = value, value_of(value)
            first = whole.dim() - len(spec.block_size)
            with node.graph.inserting_before(node):
                value = _call(_flatten, (value, first), reader, whole.flatten(first))
        with node.graph.inserting_before(node):
            source = self._with_exact_range(value, number, reader)
            kind = torch.finfo(value_of(source).dtype)
            eps = max(eps, kind.tiny * kind.eps)  # torch divides ranges in this type, and may get 0
            choose, arguments = choosing_operator(spec, low, high, eps)
            example = choose(value_of(source), *arguments)
            chosen = _call(choose, (source, *arguments), reader, example)
            scale, zero_point = (
                _call(operator.getitem, (chosen, i), reader, example[i]) for i in (0, 1)
            )
        pair = dynamic_pair(spec, low, high, scale, zero_point)
        quantized = self._quantized(node, value, pair, reader)
        for made in (chosen, quantized):
            self._port_tag(Point(observed.tensor, reader.name), reader, made)
        self._dequantize_for_each_user(observed, quantized, pair, value, None, shaped)

    def _with_exact_range(self, value: Node, number: int, reader: Node) -> Node:
        """Return a tensor for torch's operators that choose parameters: float16 as float32.

        They divide the range in the tensor's own type. In float16, ranges above 65,504 are infinite and small
        scales off by up to a third. Engines that know annotations alone look for the form without a cast.
        """
        example = value_of(value)
        if example.dtype is not torch.float16 or self._has_no_rules(number):
            return value
        return _in_type(value, torch.float32, reader, example)

    def _cast(self, observed: Observed, value: Node, dtype: torch.dtype) -> None:
        """Store or compute a tensor in a smaller float type, and read it in its own."""
        node, wide = observed.node, value_of(value).dtype
        example, constant, reader = value_of(value), constant_of(value), first_user(node)
        to = convert_without_fusing if self._has_no_rules(observed.group) else _to
        casts = [(wide, to)]
        with node.graph.inserting_before(node):
            if constant is not None and self.fold_quantize:
                small = self._buffer(f"{value.target}_half", constant.detach().to(dtype), reader)
                if to is convert_without_fusing:  # compilers look for a parameter cast twice
                    casts = [(wide, _to), (dtype, to), (wide, to)]
            else:
                small = _cast_to(value, dtype, reader, example, to)
        for user in list(node.users):
            read, reader = small, user if user.op == "call_function" else small
            with node.graph.inserting_before(user):
                for kind, cast in casts:
                    read = _cast_to(read, kind, reader, example, cast)
            if value.op == "get_attr":
                hand_over(value, read)
            self._note(observed, user, read, value)
            user.replace_input_with(node, read)

    def _dequantize_for_each_user(
        self,
        observed: Observed,
        quantized: Node,
        pair: OperatorPair,
        value: Node,
        rescale: tuple[Tensor, int] | None,
        shaped: Node | None = None,
    ) -> None:
        node, example = observed.node, value_of(value)
        exact = pair.steps <= _EXACT.get(example.dtype, 2**24)
        arguments, keywords = pair.to_float(example.dtype if exact else torch.float32)
        for user in sorted(node.users):
            reader = user if user.op == "call_function" else quantized
            with node.graph.inserting_before(user):
                read = _call(pair.dequantize, (quantized, *arguments), reader, example)
                read.kwargs = keywords
                self._port_tag(Point(observed.tensor, user.name), user, read)
                self._note(observed, user, read, value)
                if not exact and example.dtype is not torch.float32:
                    read.meta["val"] = example.to(torch.float32)
                    read = _cast_to(read, example.dtype, reader, example)
                if shaped is not None:
                    read = _call(_view_as, (read, shaped), reader, value_of(shaped))
            if rescale is not None:
                read = self._scaled(read, *rescale, before=user)
            give_source(value if shaped is None else shaped, read)
            if value.op == "get_attr":  # the only trace of its floats
                hand_over(value, read)
            user.replace_input_with(node, read)
            if self._is_shared(observed.group):
                for other in list(node.users):
                    self._note(observed, other, read, value)
                    other.replace_input_with(node, read)
                break

    def _is_shared(self, number: int) -> bool:
        """Tell whether readers share a dequantize: of a dynamic tensor, where none of them has rules.

        The engines that such annotations were written for lower that form.
        """
        dynamic = bool(getattr(self.plan.groups[number].spec, "is_dynamic", False))
        return dynamic and self._has_no_rules(number)

    def _has_no_rules(self, number: int) -> bool:
        """Tell whether annotations alone ask for a tensor's integers: other engines look for their form."""
        group = self.plan.groups[number]
        return all(not self.plan.claims[claim].captures for claim in group.claims)


def _by_input(readers: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return products by the node that gives them their input, in the order of the program."""
    found: dict[Node, list[Node]] = defaultdict(list)
    for reader in sorted(readers):
        source = reader.args[0]
        assert isinstance(source, Node)
        found[source].append(reader)
    return found


def _call(target: Callable[..., Any], args: tuple[Any, ...], like: Node, value: Any) -> Node:
    """Insert a call that belongs to `like`'s module; it does not belong to `like`'s claim."""
    node = call(like.graph, target, args, like, value)
    clear_origin(node)
    return node


def _cast_to(
    value: Node, dtype: torch.dtype, like: Node, example: Any, to: Callable[..., Any] = _to
) -> Node:
    """Insert a cast, tagged as one that a specification asked for."""
    cast = _in_type(value, dtype, like, example, to)
    tag(cast, **{CAST_TAG: True})
    return cast


def _in_type(
    value: Node, dtype: torch.dtype, like: Node, example: Any, to: Callable[..., Any] = _to
) -> Node:
    cast = _call(to, (value, dtype), like, example.to(dtype))
    give_source(value, cast)
    return cast


def _stored(q: QParams, shape: tuple[int, ...]) -> Tensor:
    """Return zero points in the type that the model holds them in: a byte for each group, else eight.

    Eight bytes would be half of what 32 weights of four bits take. torch's operator for groups subtracts in
    the integers' own type, which holds the difference of two integers of at most seven bits.
    """
    fits = q.dtype is torch.int8 and q.high - q.low <= torch.iinfo(torch.int8).max
    if not fits or q.zero_point.is_floating_point() or not per_group(q, shape):
        return q.zero_point
    return q.zero_point.to(torch.int8)


def _named(value: Node, number: int) -> str:
    """Return what the integers of a parameter are called on disk."""
    return f"integers {value.name} {number}"


def _base(node: Node) -> str:
    """Return a name for what belongs to a value, free of the numbers that fx adds."""
    return str(node.target) if node.op == "get_attr" else node.name


def float_copies(model: GraphModule, quantized: Mapping[str, str]) -> list[str]:
    """Describe the parameters that are stored as floats beside their integers, with the readers of those.

    Args:
        quantized: the parameters that have integers, each with a reader of these.
    """
    return [
        (
            f"{node.target} is stored both as integers (read by {quantized[str(node.target)]}) "
            f"and in float (read by {', '.join(user.name for user in node.users)}, which "
            f"{'is' if len(node.users) == 1 else 'are'} not quantized)"
        )
        for node in nodes_in(model)
        if node.op == "get_attr" and node.users and str(node.target) in quantized
    ]
