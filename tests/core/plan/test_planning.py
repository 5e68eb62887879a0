# SPDX-License-Identifier: Apache-2.0
"""Sharing groups: the same whatever the order, and an error that names nodes and owners where impossible."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationSpec, Quantizer
from qompose.backend import Rule
from qompose.errors import SharingError
from qompose.observers import HistogramObserver, MinMaxObserver, PlaceholderObserver
from qompose.plan.plan import Group
from qompose.plan.shared_qparams import notes_on_ranges, plan_groups
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import DerivedQuantizationSpec, QuantizationAnnotation, SharedQuantizationSpec
from qompose.spec.claim import Claim, Point, PointSpec
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from tests.core.toy import (
    ADD,
    CONV_ADD_RELU,
    INT8,
    LINEAR,
    RUN_TIME,
    UINT8,
    VIEW,
    WEIGHT,
    Model,
    claimed,
    convert,
    export,
    groups_of,
    nodes_calling,
    observers_of,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)
from tests.zoo import by_name


@pytest.fixture(scope="module")
def model() -> GraphModule:
    """Nodes, in order: x, sigmoid, relu, cat (of both), tanh."""
    chain = Model(lambda m, x: torch.tanh(torch.cat([a := torch.sigmoid(x), torch.relu(a)])))
    return export(chain, randn(2, 3)).module(check_guards=False)


def at(text: str) -> Point:
    """`"relu"` is the output of relu, `"sigmoid>relu"` the edge between them."""
    source, _, user = text.partition(">")
    return Point(source, user or None)


def spec(point: str, what: Any, *references: str, implicit: bool = True) -> PointSpec:
    """`what` is a specification, or "share" or "derive" of `references`."""
    places = tuple(map(at, references))
    if what == "share":
        what = SharedQuantizationSpec(places)  # type: ignore[arg-type]
    elif what == "derive":
        first: Any = lambda observers: observers[0].calculate_qparams()  # noqa: E731
        what = DerivedQuantizationSpec(list(places), first, torch.int32)  # type: ignore[arg-type]
    return PointSpec(at(point), what, places, implicit)


def claims(*specs: PointSpec, owner: str = "me") -> list[Claim]:
    """One claim for each specification."""
    return [
        Claim(owner=owner, rule=f"rule{i}", anchor="sigmoid", nodes=(), output="", specs=(s,))
        for i, s in enumerate(specs)
    ]


def names(groups: Iterable[Group]) -> set[frozenset[str]]:
    """As sets of "a>b" and "b"."""
    return {
        frozenset(f"{p.source}>{p.user}" if p.user else p.source for p in group.points)
        for group in groups
    }


HISTOGRAM = replace(INT8, observer_or_fake_quant_ctr=HistogramObserver)


def chosen_by(factory: Any) -> QuantizationSpec:
    return replace(RUN_TIME, observer_or_fake_quant_ctr=factory)


class Coarse(PlaceholderObserver):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given, eps=0.05)


COARSE = PlaceholderObserver.with_args(eps=0.05)
PER_TOKEN = replace(RUN_TIME, qscheme=torch.per_channel_affine, block_size=(-1,))
SHARED: dict[str, tuple[list[PointSpec], list[set[str]]]] = {
    "edges of one tensor": (
        [spec("sigmoid>relu", INT8), spec("sigmoid>cat", INT8)], [{"sigmoid>relu", "sigmoid>cat"}],
    ),
    "an edge and its producer": (
        [spec("sigmoid", INT8), spec("sigmoid>relu", INT8), spec("relu", INT8)],
        [{"sigmoid", "sigmoid>relu"}, {"relu"}],
    ),
    "the same integers, estimated by another observer": (
        [spec("sigmoid", INT8), spec("sigmoid>relu", HISTOGRAM)], [{"sigmoid", "sigmoid>relu"}],
    ),
    "parameters chosen at run time, whatever observer it is": (
        [spec("sigmoid>relu", RUN_TIME), spec("sigmoid>cat", chosen_by(MinMaxObserver))],
        [{"sigmoid>relu", "sigmoid>cat"}],
    ),
    "not with another least scale, which an observer gives": (
        [spec("sigmoid>relu", RUN_TIME),
         spec("sigmoid>cat", chosen_by(PlaceholderObserver.with_args(eps=0.05)))],
        [{"sigmoid>relu"}, {"sigmoid>cat"}],
    ),
    "nor where its class, a function or a tensor gives it": (
        [spec("sigmoid", RUN_TIME), spec("sigmoid>relu", chosen_by(Coarse)),
         spec("sigmoid>cat", chosen_by(lambda **own: PlaceholderObserver(**own, eps=0.06))),
         spec("relu", RUN_TIME),
         spec("relu>cat", chosen_by(partial(PlaceholderObserver.with_args(eps=torch.tensor(0.05)))))],
        [{"sigmoid"}, {"sigmoid>relu"}, {"sigmoid>cat"}, {"relu"}, {"relu>cat"}],
    ),
    "but with one for each token, where none applies": (
        [spec("sigmoid>relu", PER_TOKEN),
         spec("sigmoid>cat", replace(PER_TOKEN, observer_or_fake_quant_ctr=COARSE))],
        [{"sigmoid>relu", "sigmoid>cat"}],
    ),
    "different specifications stay apart": (
        [spec("sigmoid", INT8), spec("sigmoid>relu", UINT8), spec("sigmoid>cat", UINT8)],
        [{"sigmoid"}, {"sigmoid>relu", "sigmoid>cat"}],
    ),
    "not where an annotation forbids it": (
        [spec("sigmoid", INT8), spec("sigmoid>relu", INT8, implicit=False)],
        [{"sigmoid"}, {"sigmoid>relu"}],
    ),
    "explicitly, where implicitly is forbidden": (
        [spec("sigmoid>relu", INT8, implicit=False),
         spec("relu", "share", "sigmoid>relu", implicit=False)],
        [{"sigmoid>relu", "relu"}],
    ),
    "a requantization on both edges of a concatenation": (
        [spec("sigmoid", INT8), spec("sigmoid>cat", "share", "relu>cat"),
         spec("relu>cat", UINT8), spec("relu", INT8)],
        [{"sigmoid"}, {"sigmoid>cat", "relu>cat"}, {"relu"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("specs", "expected"), SHARED.values(), ids=SHARED)
def test_groups_are_the_same_for_any_order_of_claims(
    model: GraphModule, specs: list[PointSpec], expected: list[set[str]]
) -> None:
    """Not even their own order depends on it: it is that of the graph. Each has its claims."""
    groups = plan_groups(model, claims(*specs))
    assert names(groups) == set(map(frozenset, expected))
    assert sum(len(group.points) for group in groups) == len(specs)
    for group in groups:
        assert group.claims == tuple(i for i, s in enumerate(specs) if s.point in group.points)
        assert isinstance(group.spec, QuantizationSpec)
    for order in itertools.permutations(specs):
        found = plan_groups(model, claims(*order))
        assert [group.points for group in found] == [group.points for group in groups]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_the_producers_observer_estimates_for_all_and_the_others_are_listed(
    model: GraphModule, order: tuple[int, ...]
) -> None:
    specs = [spec("sigmoid", INT8), spec("sigmoid>relu", HISTOGRAM)]
    asked = [*claims(specs[0], owner="a"), *claims(specs[1], owner="b")]
    ordered = [asked[i] for i in order]
    (group,) = plan_groups(model, ordered)
    assert group.spec is INT8
    (note,) = notes_on_ranges(ordered, [group])
    for name in ("sigmoid -> relu", "output of sigmoid", "MinMaxObserver", "HistogramObserver"):
        assert name in note
    assert " a" in note and " b" in note
    assert notes_on_ranges(claims(*specs), plan_groups(model, claims(*specs))) == []


def test_a_least_scale_without_effect_is_told() -> None:
    given = replace(PER_TOKEN, observer_or_fake_quant_ctr=COARSE)
    for activation, told in ((given, 1), (PER_TOKEN, 0), (chosen_by(COARSE), 0)):
        config = qompose.QuantizationConfig(activation, None, WEIGHT)
        prepared = qompose.prepare_pt2e(
            export(nn.Linear(3, 4), randn(2, 3)), toy(LINEAR, config=config)
        )
        notes = [note for note in plan_of(prepared).notes if "eps=0.05" in note]
        assert len(notes) == told and all("per-token" in note for note in notes)


TWO = "output of sigmoid.*output of relu"
CYCLES: dict[str, tuple[list[PointSpec], str]] = {
    "itself": ([spec("sigmoid", "share", "sigmoid")], "output of sigmoid"),
    "two": ([spec("sigmoid", "share", "relu"), spec("relu", "share", "sigmoid")], TWO),
    "leads nowhere": ([spec("sigmoid", "share", "relu")], TWO),
    "derived from nothing": ([spec("sigmoid", "derive", "relu")], TWO),
    "derived in a circle": (
        [spec("sigmoid", "derive", "relu"), spec("relu", "derive", "sigmoid")], TWO,
    ),
    "of itself": ([spec("relu", "derive", "relu")], "output of relu"),
}  # fmt: skip


@pytest.mark.parametrize(("specs", "named"), CYCLES.values(), ids=CYCLES)
def test_impossible_sharing_names_nodes_and_owners(
    model: GraphModule, specs: list[PointSpec], named: str
) -> None:
    with pytest.raises(SharingError, match=named):
        plan_groups(model, claims(*specs))
    for order in itertools.permutations(specs):
        with pytest.raises(SharingError) as caught:
            plan_groups(
                model, [c for i, s in enumerate(order) for c in claims(s, owner=f"owner{i}")]
            )
        assert all(f"{s.point} (owner{i}, rule" in str(caught.value) for i, s in enumerate(order))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_derived_groups_come_after_what_they_are_derived_from(
    model: GraphModule, order: tuple[int, ...]
) -> None:
    specs = [
        spec("x>sigmoid", "derive", "relu", "cat"),
        spec("relu", "derive", "cat"),
        spec("cat", "share", "tanh"),
        spec("tanh", INT8),
    ]
    groups = plan_groups(model, claims(*(specs[i] for i in order)))
    assert [sorted(p.source for p in group.points) for group in groups] == [
        ["cat", "tanh"], ["relu"], ["x"],
    ]  # fmt: skip
    assert [group.depends_on for group in groups] == [(), (0,), (1, 0)]


def test_two_specifications_of_one_tensor_are_an_error_that_names_both_owners(
    model: GraphModule,
) -> None:
    first = claims(spec("sigmoid>relu", INT8), owner="first")
    for other in (UINT8, "share"):
        second = claims(spec("sigmoid>relu", other, *["x"] * (other == "share")), owner="second")
        with pytest.raises(SharingError, match=r"sigmoid -> relu \(first.*second"):
            plan_groups(model, [*first, *second])
    assert len(plan_groups(model, [*first, *claims(spec("sigmoid>relu", INT8))])) == 1


def test_a_long_chain_of_shared_points_needs_no_recursion(model: GraphModule) -> None:
    chain = [spec("n0", INT8), *(spec(f"n{i}", "share", f"n{i - 1}") for i in range(1, 1200))]
    assert len(plan_groups(model, claims(*chain))) == 1
    assert len(plan_groups(model, claims(*reversed(chain)))) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_the_groups_are_the_connected_components(
    model: GraphModule, targets: list[int], random: Any
) -> None:
    """Each point shares with an earlier one, or has a specification of its own where it points to itself."""
    parents = [min(target, i) for i, target in enumerate(targets)]
    specs = [
        spec(f"n{i}", INT8) if parent == i else spec(f"n{i}", "share", f"n{parent}")
        for i, parent in enumerate(parents)
    ]
    roots = list(range(8))
    for i, parent in enumerate(parents):
        roots[i] = i if parent == i else roots[parent]
    random.shuffle(specs)
    groups = names(plan_groups(model, claims(*specs)))
    assert groups == {frozenset(f"n{i}" for i in range(8) if roots[i] == root) for root in roots}


X = randn(4, 4)


def program(function: Callable[..., Any], x: Tensor = X) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes self.lstm")  # torch 2.13
        return export(seeded(Model(function, conv=nn.Conv2d(1, 1, 1), lstm=nn.LSTM(4, 4))), x)


Writes = dict[str, Any]


class Named(Quantizer):
    """Annotates by name: `"a>b"` is the edge from a to b, `"b"` its output; a string is a shared place."""

    def __init__(self, writes: Writes, name: str = "named") -> None:
        self.writes, self.label = writes, name

    @property
    def name(self) -> str:
        return self.label

    def annotate(self, model: GraphModule) -> GraphModule:
        nodes = {node.name: node for node in model.graph.nodes}

        def place(text: str) -> Any:
            source, _, user = text.partition(">")
            return (nodes[source], nodes[user]) if user else nodes[source]

        for text, spec in self.writes.items():
            where = place(text)
            written = SharedQuantizationSpec(place(spec)) if isinstance(spec, str) else spec
            holder: Node = where[1] if isinstance(where, tuple) else where
            annotation = holder.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation())
            if isinstance(where, tuple):
                annotation.input_qspec_map[where[0]] = written
            else:
                annotation.output_qspec = written
        return model


def _views(m: Any, x: Tensor) -> Tensor:
    return torch.sin(x.view(2, 8).transpose(0, 1).reshape(4, 4))


def _split(m: Any, x: Tensor) -> Tensor:
    one, other = x.split(2)
    return torch.sin(one) + other


def _maximum(m: Any, x: Tensor) -> Any:
    values, indices = x.max(dim=1)
    return torch.sin(values), indices


def _lstm(m: Any, x: Tensor) -> Any:
    out, (hidden, _) = m.lstm(x)
    return torch.sin(out), hidden


def _late(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(torch.relu(torch.sin(x)))


VIEWS = {"x>view", "view", "view>transpose", "transpose", "transpose>reshape", "reshape"}
PROGRAMS: dict[str, tuple[Callable[..., Any], Writes, list[set[str]]]] = {
    "cat([x, x])": (
        lambda m, x: torch.cat([torch.sin(x)] * 2),
        {"sin>cat": INT8, "cat": "sin>cat"}, [{"sin>cat", "cat"}],
    ),
    "views from an input": (
        _views,
        {"x>view": INT8, "view": "x>view", "view>transpose": "view", "transpose": "view>transpose",
         "transpose>reshape": "transpose", "reshape": "transpose>reshape"},
        [VIEWS],
    ),
    "views that are alike": (_views, dict.fromkeys(VIEWS, INT8), [VIEWS]),
    "not per channel, for a view changes the channels": (
        _views, {"x>view": WEIGHT, "view": WEIGHT}, [{"x>view"}, {"view"}],
    ),
    "both parts of a split": (
        _split, {"x>split": INT8, "getitem": "x>split", "getitem_1": "getitem"},
        [{"x>split", "getitem", "getitem_1"}],
    ),
    "not the split itself": (_split, {"x>split": INT8, "split": INT8}, [{"x>split"}]),
    "parts are two": (_split, {"getitem": INT8, "getitem_1": INT8}, [{"getitem"}, {"getitem_1"}]),
    "unbind": (
        lambda m, x: sum(x.unbind(0)),
        {"x>unbind": INT8, **{f"getitem{n}": "x>unbind" for n in ("", "_1", "_2", "_3")}},
        [{"x>unbind", "getitem", "getitem_1", "getitem_2", "getitem_3"}],
    ),
    "max: indices are integers": (
        _maximum, {"x>max_1": INT8, "getitem": "x>max_1", "getitem_1": INT8},
        [{"x>max_1", "getitem"}],
    ),
    "lstm: a list of weights, three outputs": (
        _lstm,
        {"x>unsqueeze": INT8, "lstm_weight_ih_l0>lstm": WEIGHT, "getitem": INT8, "getitem_1": INT8},
        [{"x>unsqueeze"}, {"lstm_weight_ih_l0>lstm"}, {"getitem"}, {"getitem_1"}],
    ),
    "list argument by keyword": (
        lambda m, x: torch.cat(tensors=[torch.sin(x), torch.cos(x)], dim=1),
        {"sin>cat": INT8, "cos>cat": "sin>cat", "cat": "cos>cat"}, [{"sin>cat", "cos>cat", "cat"}],
    ),
    "two observers, one tensor": (_late, {"sin": INT8, "sin>relu": HISTOGRAM}, [{"sin", "sin>relu"}]),
    "x + x": (lambda m, x: x + x, {"x>add": INT8, "add": "x>add"}, [{"x>add", "add"}]),
}  # fmt: skip


@pytest.mark.parametrize(("function", "writes", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_groups_have_one_scale_each(
    function: Any, writes: Writes, expected: list[set[str]]
) -> None:
    """In the graph: one observer and one scale for each, and one quantize for each tensor in it."""
    exported = program(function)
    prepared = prepare(exported, Named(writes))
    assert names(plan_of(prepared).groups) == set(map(frozenset, expected))
    observed = defaultdict(set)
    for node in observers_of(prepared):
        observed[prepared.get_submodule(str(node.target))].add(str(node.args[0]))
    sources = [{point.source for point in group.points} for group in plan_of(prepared).groups]
    assert sorted(map(sorted, observed.values())) == sorted(map(sorted, sources))
    float_outputs = tree_leaves(exported.module()(X))
    outputs = zip(float_outputs, tree_leaves(prepared(X)), strict=True)
    assert all(torch.equal(one, other) for one, other in outputs)
    converted = qompose.convert_pt2e(prepared)
    quantizes = nodes_calling(converted, "quantize_per_tensor")
    per_tensor = [g for g in plan_of(prepared).groups if g.spec.qscheme is INT8.qscheme]
    assert len(quantizes) == sum(len({p.source for p in g.points}) for g in per_tensor)
    assert len({node.args[1:6] for node in quantizes}) <= len(per_tensor)
    for one, other in zip(float_outputs, tree_leaves(converted(X)), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other) or sqnr(one, other) > 28


def test_dynamic_points_that_share_compute_their_own_parameters() -> None:
    writes = {"x>view": RUN_TIME, "view": "x>view", "transpose>reshape": "view"}
    converted = convert(program(_views), Named(writes), X)
    assert len(nodes_calling(converted, "choose_qparams")) == 3
    assert sqnr(torch.sin(X.view(2, 8).t().reshape(4, 4)), converted(X)) > 30


def test_channels_of_another_number_are_refused() -> None:
    channels = Named({"sin>cat": WEIGHT, "cat": "sin>cat"})
    exported = program(lambda m, x: torch.cat([torch.sin(x), torch.cos(x)]))
    with pytest.raises(SharingError, match=r"sin -> cat \(named.*output of cat .*\(4,\).*\(8,\)"):
        prepare(exported, channels)


def test_what_shares_with_integers_is_dropped_with_them() -> None:
    writes: Writes = {"x>max_1": INT8, "getitem": "getitem_1", "getitem_1": INT8}
    prepared = prepare(program(_maximum), Named(writes))
    assert names(plan_of(prepared).groups) == {frozenset({"x>max_1"})}
    said = [row.reason for row in qompose.report(prepared).rows if row.name == "getitem"]
    said += [note for note in qompose.report(prepared).notes if "output of getitem by" in note]
    assert any("output of getitem_1" in text and "named" in text for text in said)


def test_members_share_across_owners() -> None:
    members = Named({"sin": "relu>tanh"}, name="one"), Named({"relu>tanh": UINT8}, name="other")
    prepared = prepare(program(_late), qompose.compose(*members))
    assert names(plan_of(prepared).groups) == {frozenset({"sin", "relu>tanh"})}


IMAGE = randn(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("function", "rule", "roles"),
    [
        pytest.param(lambda m, x: x + x, ADD, {"self", "other"}, id="x + x"),
        pytest.param(
            lambda m, x: (m.conv(x) + x).relu(), CONV_ADD_RELU, {"input", "other"}, id="conv(x) + x"
        ),
    ],
)
def test_one_tensor_in_two_roles(function: Any, rule: Rule, roles: set[str]) -> None:
    exported = program(function, IMAGE)
    prepared = prepare(exported, toy(rule))
    (claim,) = plan_of(prepared).claims
    assert (claim.rule, len(claim.nodes)) == (rule.name, len(rule.name.split("_")))
    assert {o.role for o in claim.operands if o.role not in ("weight", "op")} == roles
    assert len([g for g in groups_of(prepared) if any(p.startswith("x ->") for p in g)]) == 1
    prepared(IMAGE)
    converted = qompose.convert_pt2e(prepared)
    (quantize,) = (n for n in converted.graph.nodes if str(n.args[:1]) == "(x,)")
    assert "quantize" in quantize.name, "the tensor is quantized once"
    assert sqnr(exported.module()(IMAGE), converted(IMAGE)) > 30


def test_one_tensor_in_two_roles_of_another_order() -> None:
    exported = program(lambda m, x: (x + m.conv(x)).relu(), IMAGE)
    assert claimed(prepare(exported, toy(CONV_ADD_RELU))) == {}


MODELS = ("conv_bn_relu", "self_concatenation", "cond_shared_weight", "scan_cell")


@pytest.mark.parametrize("name", MODELS)
def test_plans_on_file(name: str, on_file: SnapshotAssertion) -> None:
    assert prepare(by_name(name).export(), toy()).meta["qompose"].plan.to_dict() == on_file


def test_text_has_a_line_for_each_fact() -> None:
    plan = prepare(by_name("conv_bn_relu").export(), toy()).meta["qompose"].plan
    assert {
        "toy, rule conv_relu: conv2d -> relu in 0.0, static",
        "    _0_0_weight -> conv2d: int8 [-127, 127] per_channel_symmetric axis 0, group 0",
        "    output of relu: int8 [-128, 127] per_tensor_affine, group 4",
        "float: flatten (aten.flatten.using_ints in 2.1): no rule claims it",
        "rewritten by fold_batch_norm: conv2d, batch_norm",
        "idle",
    } < {*str(replace(plan, notes=("idle",))).split("\n")}
    moved = Model(lambda m, x: m.linear(x).view(-1, 2), linear=nn.Linear(3, 4))
    shared = prepare(export(moved, randn(6, 3)), toy(LINEAR, VIEW)).meta["qompose"].plan
    assert "    output of view: as linear -> view, group 2" in str(shared).split("\n")
