# SPDX-License-Identifier: Apache-2.0
"""Sharing in programs: repeated operands, late anchors, chains of views, operators with several outputs."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec, Quantizer
from qompose.errors import SharingError
from qompose.observers import HistogramObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import QuantizationAnnotation, SharedQuantizationSpec
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.toy import (
    ADD,
    CONV_ADD_RELU,
    INT8,
    UINT8,
    WEIGHT,
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

X = randn(4, 4)
HISTOGRAM = replace(INT8, observer_or_fake_quant_ctr=HistogramObserver)
CHANNELS = QuantizationSpec(
    torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0
)


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(1, 1, 1)
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def program(function: Callable[..., Any], x: Tensor = X) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes self.lstm")  # torch 2.13
        return export(seeded(Function(function)), x)


Writes = dict[str, Any]


class Named(Quantizer):
    """Annotates by name: `"a>b"` is the edge from a to b, `"b"` its output; a string is a shared place."""

    def __init__(self, writes: Writes, implicit: bool = True, name: str = "named") -> None:
        self.writes, self.implicit, self.label = writes, implicit, name

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
            holder: Node = where[1] if isinstance(where, tuple) else where
            annotation = holder.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation())
            annotation.allow_implicit_sharing = self.implicit
            written = SharedQuantizationSpec(place(spec)) if isinstance(spec, str) else spec
            if isinstance(where, tuple):
                annotation.input_qspec_map[where[0]] = written
            else:
                annotation.output_qspec = written
        return model


def groups(module: GraphModule) -> set[frozenset[str]]:
    """As sets of "a>b" and "b"."""
    return {
        frozenset(f"{p.source}>{p.user}" if p.user else p.source for p in group.points)
        for group in plan_of(module).groups
    }


def _cat_twice(m: Any, x: Tensor) -> Tensor:
    y = torch.sin(x)
    return torch.cat([y, y])


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


def _keyword(m: Any, x: Tensor) -> Tensor:
    return torch.cat(tensors=[torch.sin(x), torch.cos(x)], dim=1)


def _late(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(torch.relu(torch.sin(x)))


PROGRAMS = [
    pytest.param(
        _cat_twice, {"sin>cat": INT8, "cat": "sin>cat"}, [{"sin>cat", "cat"}], id="cat([x, x])"
    ),
    pytest.param(
        _cat_twice, {"sin>cat": "cat", "cat": INT8}, [{"sin>cat", "cat"}], id="cat([x, x]), backwards"
    ),
    pytest.param(
        _views,
        {"x>view": INT8, "view": "x>view", "view>transpose": "view", "transpose": "view>transpose",
         "transpose>reshape": "transpose", "reshape": "transpose>reshape"},
        [{"x>view", "view", "view>transpose", "transpose", "transpose>reshape", "reshape"}],
        id="views from an input",
    ),
    pytest.param(
        _views,
        {"x>view": INT8, "view": INT8, "view>transpose": INT8, "transpose": INT8,
         "transpose>reshape": INT8, "reshape": INT8},
        [{"x>view", "view", "view>transpose", "transpose", "transpose>reshape", "reshape"}],
        id="views that are alike",
    ),
    pytest.param(
        _views,
        {"x>view": CHANNELS, "view": CHANNELS},
        [{"x>view"}, {"view"}],
        id="not per channel, for a view changes the channels",
    ),
    pytest.param(
        _split,
        {"x>split": INT8, "getitem": "x>split", "getitem_1": "getitem"},
        [{"x>split", "getitem", "getitem_1"}],
        id="both parts of a split",
    ),
    pytest.param(_split, {"x>split": INT8, "split": INT8}, [{"x>split"}], id="not the split itself"),
    pytest.param(
        _split, {"getitem": INT8, "getitem_1": INT8}, [{"getitem"}, {"getitem_1"}], id="parts are two"
    ),
    pytest.param(
        lambda m, x: sum(x.unbind(0)),
        {"x>unbind": INT8, **{f"getitem{n}": "x>unbind" for n in ("", "_1", "_2", "_3")}},
        [{"x>unbind", "getitem", "getitem_1", "getitem_2", "getitem_3"}],
        id="unbind",
    ),
    pytest.param(
        lambda m, x: torch.cat(x.chunk(2, 1)),
        {"x>chunk": INT8, "getitem>cat": "x>chunk", "getitem_1>cat": "getitem>cat", "cat": "x>chunk"},
        [{"x>chunk", "getitem>cat", "getitem_1>cat", "cat"}],
        id="chunk and cat",
    ),
    pytest.param(
        _maximum,
        {"x>max_1": INT8, "getitem": "x>max_1", "getitem_1": INT8},
        [{"x>max_1", "getitem"}],
        id="max: indices are integers",
    ),
    pytest.param(
        _lstm,
        {"x>unsqueeze": INT8, "lstm_weight_ih_l0>lstm": WEIGHT, "getitem": INT8, "getitem_1": INT8},
        [{"x>unsqueeze"}, {"lstm_weight_ih_l0>lstm"}, {"getitem"}, {"getitem_1"}],
        id="lstm: a list of weights, three outputs",
    ),
    pytest.param(
        _keyword,
        {"sin>cat": INT8, "cos>cat": "sin>cat", "cat": "cos>cat"},
        [{"sin>cat", "cos>cat", "cat"}],
        id="list argument by keyword",
    ),
    pytest.param(
        _late,
        {"sin": "relu>tanh", "relu": "sin", "relu>tanh": INT8},
        [{"sin", "relu", "relu>tanh"}],
        id="the anchor comes last",
    ),
    pytest.param(
        _late, {"sin": INT8, "sin>relu": HISTOGRAM}, [{"sin", "sin>relu"}], id="two observers, one tensor"
    ),
    pytest.param(
        lambda m, x: x + x, {"x>add": INT8, "add": "x>add"}, [{"x>add", "add"}], id="x + x"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "writes", "expected"), PROGRAMS)
def test_groups(function: Any, writes: Writes, expected: list[set[str]]) -> None:
    exported = program(function)
    prepared = prepare(exported, Named(writes))
    assert groups(prepared) == set(map(frozenset, expected))
    float_outputs = torch.utils._pytree.tree_leaves(exported.module()(X))
    for one, other in zip(float_outputs, torch.utils._pytree.tree_leaves(prepared(X)), strict=True):
        assert torch.equal(one, other)
    outputs = torch.utils._pytree.tree_leaves(qompose.convert_pt2e(prepared)(X))
    for one, other in zip(float_outputs, outputs, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other) or sqnr(one, other) > 28


@pytest.mark.parametrize(("function", "writes", "expected"), PROGRAMS)
def test_one_scale_for_each_group(function: Any, writes: Writes, expected: list[set[str]]) -> None:
    """In the graph: one observer and one scale for each, and one quantize for each tensor in it."""
    prepared = prepare(program(function), Named(writes))
    observers = {prepared.get_submodule(str(node.target)) for node in observers_of(prepared)}
    assert len(observers) == len(expected)
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    quantizes = nodes_calling(converted, "quantize_per_tensor")
    per_tensor = [g for g in plan_of(prepared).groups if g.spec.qscheme is INT8.qscheme]
    assert len(quantizes) == sum(len({p.source for p in g.points}) for g in per_tensor)
    assert len({node.args[1:6] for node in quantizes}) <= len(per_tensor)


def test_a_split_itself_is_no_tensor_and_the_report_says_so() -> None:
    prepared = prepare(program(_split), Named({"split": INT8, "sin": INT8}))
    rows = {row.name: row.reason for row in qompose.report(prepared).rows}
    assert "output of split is no tensor" in rows["split"]


def test_the_order_of_annotations_does_not_matter() -> None:
    writes = {"x>view": INT8, "view": "x>view", "view>transpose": "view", "transpose": "view"}
    exported = program(_views)
    seen = {
        frozenset(groups(prepare(exported, Named(dict(order)))))
        for order in itertools.permutations(writes.items())
    }
    assert seen == {frozenset({frozenset(writes)})}


@pytest.mark.parametrize("implicit", [True, False])
def test_implicit_sharing_can_be_switched_off(implicit: bool) -> None:
    writes = {"sin": INT8, "sin>relu": INT8, "relu": INT8, "relu>tanh": INT8}
    prepared = prepare(program(_late), Named(writes, implicit))
    joined = [{"sin", "sin>relu"}, {"relu", "relu>tanh"}]
    apart = [{place} for place in writes]
    assert groups(prepared) == set(map(frozenset, joined if implicit else apart))


def test_dynamic_points_that_share_compute_their_own_parameters() -> None:
    run_time = QuantizationSpec(
        torch.int8, PlaceholderObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True
    )
    writes = {"x>view": run_time, "view": "x>view", "transpose>reshape": "view"}
    converted = convert(program(_views), Named(writes), X)
    assert len(nodes_calling(converted, "choose_qparams")) == 3
    assert sqnr(torch.sin(X.view(2, 8).t().reshape(4, 4)), converted(X)) > 30


IMPOSSIBLE = [
    pytest.param(
        _late, {"sin": "relu", "relu": "sin"}, "output of sin .*output of relu .*", id="a circle"
    ),
    pytest.param(_late, {"sin": "sin"}, r"none has any: output of sin \(", id="itself"),
    pytest.param(
        _late, {"sin": "tanh"}, "output of sin .*output of tanh, which no quantizer", id="nowhere"
    ),
    pytest.param(
        lambda m, x: torch.cat([torch.sin(x), torch.cos(x)]),
        {"sin>cat": CHANNELS, "cat": "sin>cat"},
        r"sin -> cat .*output of cat .*per_channel.*\(4,\).*\(8,\)", id="channels of another number",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "writes", "message"), IMPOSSIBLE)
def test_errors_name_both_nodes_and_the_owner(function: Any, writes: Writes, message: str) -> None:
    with pytest.raises(SharingError, match=message) as caught:
        prepare(program(function), Named(writes))
    assert "(named, rule annotation)" in str(caught.value)


def test_what_shares_with_integers_is_dropped_with_them() -> None:
    writes: Writes = {"x>max_1": INT8, "getitem": "getitem_1", "getitem_1": INT8}
    prepared = prepare(program(_maximum), Named(writes))
    assert groups(prepared) == {frozenset({"x>max_1"})}
    said = [row.reason for row in qompose.report(prepared).rows if row.name == "getitem"]
    said += [note for note in qompose.report(prepared).notes if "output of getitem," in note]
    assert any("output of getitem_1 is torch.int64" in text and "named" in text for text in said)


def test_errors_name_both_owners() -> None:
    """A later member may share with an earlier one's tensor: here it leads back."""
    members = Named({"sin": "relu"}, name="one"), Named({"relu": "sin"}, name="other")
    with pytest.raises(SharingError) as caught:
        prepare(program(_late), qompose.compose(*members))
    assert "output of sin (one, rule annotation)" in str(caught.value)
    assert "output of relu (other, rule annotation)" in str(caught.value)


def test_members_share_across_owners() -> None:
    members = Named({"sin": "relu>tanh"}, name="one"), Named({"relu>tanh": UINT8}, name="other")
    prepared = prepare(program(_late), qompose.compose(*members))
    assert groups(prepared) == {frozenset({"sin", "relu>tanh"})}


IMAGE = randn(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("function", "rules", "expected"),
    [
        pytest.param(lambda m, x: x + x, (ADD,), {"add": ("add",)}, id="x + x"),
        pytest.param(
            lambda m, x: (m.conv(x) + x).relu(),
            (CONV_ADD_RELU,),
            {"conv_add_relu": ("conv2d", "add", "relu")},
            id="conv(x) + x",
        ),
        pytest.param(
            lambda m, x: (x + m.conv(x)).relu(), (CONV_ADD_RELU,), {}, id="not the other way round"
        ),
    ],
)
def test_one_tensor_in_two_roles(function: Any, rules: Any, expected: Any) -> None:
    exported = program(function, IMAGE)
    prepared = prepare(exported, toy(*rules))
    assert claimed(prepared) == expected
    if not expected:
        return
    (claim,) = plan_of(prepared).claims
    sources = {
        (o.role, o.user, o.position) for o in claim.operands if o.role not in ("weight", "op")
    }
    roles = {role for role, _, _ in sources}
    assert roles == ({"self", "other"} if "add" in expected else {"input", "other"})
    assert len([g for g in groups_of(prepared) if any(p.startswith("x ->") for p in g)]) == 1
    prepared(IMAGE)
    converted = qompose.convert_pt2e(prepared)
    quantizes = [n for n in converted.graph.nodes if str(n.args[:1]) == "(x,)"]
    assert "quantize" in quantizes[0].name
    assert len(quantizes) == 1, "the tensor is quantized once"
    assert sqnr(exported.module()(IMAGE), converted(IMAGE)) > 30


def test_a_kernel_reads_each_role_of_one_tensor() -> None:
    """The region's operands of both roles are the places where they are read."""
    seen = []

    def emit(region: qompose.backend.Region) -> Node:
        seen.append({role: [str(n) for n in region.inputs(role)] for role in ("self", "other")})
        x, y = region.quantized("self"), region.quantized("other")
        seen.append((x.node.name, y.node.name, x.qparams == y.qparams))
        raise qompose.backend.NotLowerable("only looking")

    rule = replace(ADD, kernels={"torch": qompose.backend.Kernel("look", emit)})
    converted = convert(program(lambda m, x: torch.sin(x) + torch.sin(x)), toy(rule), X)
    twice = convert(program(lambda m, x: x + x), toy(rule), X)
    for model in (converted, twice):
        with pytest.warns(qompose.QomposeWarning, match="only looking"):
            qompose.lower(model)
    assert [len(places["self"]) for places in seen[::2]] == [1, 2], "a place for each argument"
    assert seen[3][0] == seen[3][1] and seen[3][2], "both roles read the integers of x"
    assert seen[1][0] != seen[1][1]


def test_getitem_is_known_as_a_move() -> None:
    assert operator.getitem in qompose.backend.VALUE_PRESERVING
