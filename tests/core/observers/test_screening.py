# SPDX-License-Identifier: Apache-2.0
"""Masks stay masks, NaN is named, and what is only large is not taken for either."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from hypothesis import example, given, settings, strategies as st
from qompose import QuantizationConfig, QuantizationSpec
from qompose.backend import OperatorPattern
from qompose.errors import BatchError, CalibrationError
from qompose.observers import HistogramObserver
from qompose.observers.value_screening import Screen, TensorScreen
from qompose.spec import qdq
from torch import Tensor, nn
from torch.ao.quantization import observer as peer
from torch.fx import Node

from tests.core.toy import (
    INT8,
    LINEAR,
    RULES,
    WEIGHT,
    Annotator,
    Call,
    Model,
    annotate,
    convert,
    export,
    graph_text,
    prepare,
    randn,
    rule,
    seeded,
    sqnr,
    toy,
)

INF, WIDTH, LENGTH, KEPT = math.inf, 8, 6, 4


def by(observer: Any) -> QuantizationSpec:
    return replace(INT8, observer_or_fake_quant_ctr=observer)


HISTOGRAM = by(HistogramObserver)
ATTENTION = (
    *RULES,
    rule("softmax", OperatorPattern((torch.ops.aten.softmax.int,)), activations=("self",)),
    rule("product", OperatorPattern((torch.ops.aten.matmul.default,)), activations=("self", "other")),
)  # fmt: skip


class Attention(nn.Module):
    """BERT's: `value` is added to the scores of hidden positions."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.hidden = value
        self.to(dtype)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.zeros_like(keep, dtype=x.dtype).masked_fill(~keep, self.hidden)[:, None]
        scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(WIDTH)
        weights = (scores + mask).softmax(-1)
        return self.out(weights @ self.value(x)), weights


def smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
QUICK = [
    *((-INF, F32, INT8), (-INF, F16, HISTOGRAM), (smallest(BF16), BF16, INT8)),
    *((smallest(F32), F32, HISTOGRAM), (-1e4, F32, HISTOGRAM), (-1e4, F16, INT8)),
]
FURTHER = [
    *((-1e4, BF16, INT8), (smallest(F16), F16, INT8), (-1e9, F32, INT8), (-1e9, BF16, HISTOGRAM)),
    *((smallest(F16), F32, INT8), (-3e4, F16, HISTOGRAM), (smallest(F32) / 2, F32, HISTOGRAM)),
]


@pytest.mark.parametrize(
    ("value", "dtype", "activation"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.full) for row in FURTHER)],
)
def test_hidden_positions_keep_the_weight_zero(
    value: float, dtype: torch.dtype, activation: QuantizationSpec
) -> None:
    model, x = Attention(value, dtype).eval(), randn(2, LENGTH, WIDTH).to(dtype)
    keep = torch.arange(LENGTH).expand(2, -1) < KEPT
    config = QuantizationConfig(activation, activation, WEIGHT)
    converted = convert(export(model, x, keep), toy(*ATTENTION, config=config), x, keep)
    (expected, all_weights), (actual, weights) = model(x, keep), converted(x, keep)
    assert torch.equal(all_weights[..., KEPT:], torch.zeros(2, LENGTH, LENGTH - KEPT, dtype=dtype))
    assert torch.equal(weights[..., KEPT:], all_weights[..., KEPT:])
    assert sqnr(all_weights, weights) > 40
    assert sqnr(expected, actual) > 35
    rows = {row.operator: row for row in qompose.report(converted).rows}
    for operator in ("aten.add.Tensor", "aten.softmax.int"):
        assert rows[operator].state == "float"
        assert rows[operator].owner == "toy", "who wanted it is still said"
        assert "output of add" in rows[operator].reason
    assert rows["aten.linear"].state == rows["aten.matmul"].state == "simulated (Q/DQ)"


def inner() -> Any:
    return seeded(Model(lambda self, x: self.inner(x), inner=nn.Linear(4, 4)))


def outliers(*values: float) -> Tensor:
    x = randn(64, 4).clamp(-3, 3)
    x.view(-1)[: len(values)] = torch.tensor(values)
    return x


TAIL = -torch.logspace(0, 3.5, 256).reshape(64, 4)
GENUINE: dict[str, tuple[Tensor, float]] = {
    "an outlier of 1000 times the rest": (outliers(3000.0), 35),
    "many positive ones": (outliers(*[2900.0 + i for i in range(20)]), 35),
    "an outlier of -990": (outliers(-990.0), 25),
    "an outlier of 200 times the most negative": (outliers(-1e4, -50.0), 25),
    "a continuous tail to -3000": (TAIL, 35),
    "heavy tails on both sides": (
        torch.distributions.Cauchy(0.0, 1.0).icdf(torch.linspace(0.0005, 0.9995, 256)).view(64, 4),
        30,
    ),
    "zero": (torch.zeros(64, 4), INF),
    "a negative constant": (torch.full((64, 4), -5e5), 35),
    "huge, nothing above zero": (-randn(64, 4).abs() * 1e6 - 1e5, 35),
}


@pytest.mark.parametrize(("x", "bound"), GENUINE.values(), ids=GENUINE)
def test_large_data_is_no_mask(x: Tensor, bound: float) -> None:
    model = inner()
    with torch.no_grad():
        model.inner.bias.zero_()
    converted = convert(export(model, x), toy(LINEAR), x)
    assert [row.state for row in qompose.report(converted).rows] == ["simulated (Q/DQ)"]
    assert sqnr(model(x), converted(x)) >= bound


def test_a_tiny_tensor_is_quantized_and_named_in_the_findings() -> None:
    model, x = inner(), randn(64, 4) * 1e-6
    converted = convert(export(model, x), toy(LINEAR), x)
    report = qompose.report(converted)
    assert [row.state for row in report.rows] == ["simulated (Q/DQ)"]
    assert any("x -> linear" in note for note in report.notes)
    assert torch.isfinite(converted(x)).all()


def path() -> nn.Module:
    """The logarithm is NaN where an input is negative; `encoder.middle` is the first to read it."""
    encoder = nn.ModuleDict({"first": nn.Linear(4, 4), "middle": nn.Linear(4, 4)})
    nn.init.constant_(encoder["first"].weight, 1.0)
    nn.init.zeros_(encoder["first"].bias)
    return Model(
        lambda self, x: self.encoder["middle"](self.encoder["first"](x).log().relu()),
        encoder=encoder,
    )


def torchs_own(node: Node) -> None:
    """Annotate linear layers with observers of torch."""
    if node.target is torch.ops.aten.linear.default:
        annotate(node, {node.args[0]: by(peer.MinMaxObserver)})  # type: ignore[dict-item]


X = randn(6, 4)


@pytest.mark.parametrize(
    ("quantizer", "owner"),
    [
        (toy(LINEAR), "toy"),
        (Annotator(torchs_own, "foreign"), "foreign"),
        (qompose.compose(toy(LINEAR, name="second")), "second"),
    ],
    ids=["own observers", "torch's observers", "a composition"],
)
def test_nan_names_tensor_module_owner_and_batch(quantizer: qompose.Quantizer, owner: str) -> None:
    prepared, good = prepare(export(path(), X), quantizer), X.abs()
    named = rf"relu -> linear_1 in encoder\.middle \({owner}, rule"
    with pytest.raises(CalibrationError, match=named):
        prepared(-good)
    with pytest.raises(BatchError, match=named) as caught:
        qompose.calibrate(prepared, [good, -good, good])
    assert caught.value.number == 2
    assert isinstance(caught.value.__cause__, CalibrationError)


def test_a_failed_batch_leaves_no_trace_in_the_range() -> None:
    prepared = prepare(export(inner(), X), toy(LINEAR))
    poisoned = X.clone()
    poisoned[0, 0], poisoned[1, 1] = math.nan, 1e6
    with pytest.raises(CalibrationError):
        prepared(poisoned)
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    assert graph_text(converted) == graph_text(convert(export(inner(), X), toy(LINEAR), X))


@pytest.mark.parametrize("value", [-INF, smallest(F32), -1e4], ids=str)
@pytest.mark.parametrize(
    "observer", [peer.MinMaxObserver, peer.HistogramObserver, peer.MovingAverageMinMaxObserver]
)
def test_observers_of_other_engines_see_no_mask(observer: Any, value: float) -> None:
    """Nor do they warn of one: warnings are errors here, but that nothing is left to be quantized."""

    def wants(node: Node) -> None:
        if node.target is torch.ops.aten.add.Tensor:
            annotate(node, dict.fromkeys(node.all_input_nodes, by(observer)), by(observer))

    x, mask = randn(4, 8), torch.zeros(4, 8)
    mask[:, 5:] = value
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*reduce_range")  # at construction
        prepared = prepare(export(Call(torch.add), x, mask), Annotator(wants, "foreign"))
    prepared(x, mask)
    with pytest.warns(qompose.QomposeWarning) as caught:
        converted = qompose.convert_pt2e(prepared)
    assert len(caught) == 1
    (row,) = qompose.report(converted).rows
    assert (row.state, row.owner) == ("float", "foreign")
    assert torch.equal(converted(x, mask), x + mask)
    assert not any(qdq.is_quantize(node) for node in converted.graph.nodes)


def partitions(rows: int) -> st.SearchStrategy[list[int]]:
    """Where to cut `rows` rows into batches."""
    return st.lists(st.integers(1, rows - 1), unique=True, max_size=5).map(sorted)


def spread(*values: float) -> Tensor:
    """Ordinary rows, with one of `values` in every other one."""
    x = randn(12, 4)
    x[: 2 * len(values) : 2, 1] = torch.tensor(values)
    return x


SPLIT = {
    "plain": spread(),
    "an infinite mask": spread(-INF, -INF, INF),
    "a finite mask": spread(-1e4, -9999.0),
    "a mask with what would be a tail": spread(-1500.0, -1e4, 900.0, -1200.0),
    "outliers": spread(3000.0, -20.0),
}


@pytest.mark.parametrize("activation", [INT8, HISTOGRAM], ids=["minmax", "histogram"])
@pytest.mark.parametrize("x", SPLIT.values(), ids=SPLIT)
@settings(max_examples=30)
@given(cuts=partitions(12), order=st.randoms(use_true_random=False))
def test_batches_and_their_order_do_not_matter(
    x: Tensor, activation: QuantizationSpec, cuts: list[int], order: Any
) -> None:
    whole, parts = Screen(), Screen()
    batches = list(x.tensor_split(cuts))
    order.shuffle(batches)
    whole.clean(x, "x")
    one, other = (activation.observer_or_fake_quant_ctr(dtype=torch.int8) for _ in range(2))
    one(x)
    for batch in batches:
        parts.clean(batch, "x")
        other(batch)
    assert vars(whole) == vars(parts)
    assert whole.mask == parts.mask == other.screen.mask
    for mine, theirs in zip(one.calculate_qparams(), other.calculate_qparams(), strict=True):
        assert torch.equal(mine, theirs)


@example([1.0], [smallest(F32) / 4])
@example([1.0], [-smallest(F32) / 4])
@given(
    kept=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20),
    masked=st.lists(st.sampled_from([-INF, INF, smallest(F32), smallest(F32) / 3]), max_size=5),
)
def test_masks_are_counted_and_replaced_and_nothing_else(
    kept: list[float], masked: list[float]
) -> None:
    x, screen = torch.tensor(kept + masked), Screen()
    cleaned = screen.clean(x, "x").values
    assert torch.equal(cleaned, torch.tensor(kept + [0.0] * len(masked)))
    assert (screen.masked, screen.values) == (len(masked), len(x))
    assert (screen.mask is None) is (not masked)
    assert masked or cleaned is x, "no copy where there is nothing to replace"


def test_what_is_a_mask_by_its_type() -> None:
    """A quarter of the largest float is one in other types; in float16 it is an ordinary activation."""
    screen, half = Screen(), Screen()
    screen.clean(torch.tensor([1.0, smallest(F32)], dtype=torch.float64), "x")
    half.clean((randn(64, 4).clamp(-2, 2) * 1e4).half(), "x")
    assert (screen.masked, half.masked, half.mask) == (1, 0, None)
    for least in (F16, BF16, F32):
        own = Screen()
        own.clean(torch.tensor([1.0, smallest(least)], dtype=least), "x")
        assert own.masked == 1
    observer: Any = HISTOGRAM.observer_or_fake_quant_ctr(dtype=torch.int8)
    observer(torch.tensor([[1.0, 1e39]], dtype=torch.float64))
    assert observer.screen.masked == 1 and observer.calculate_qparams()[0].isfinite().all()


@given(st.floats(-9e8, -1001, width=32), st.floats(0, 1e6, width=32))
@example(-25600.0, 100.0)
@example(-1000.0, 3.0)
def test_a_finite_mask_is_what_leaves_the_rest_no_step(far: float, bulk: float) -> None:
    """The rest of at most 1/256 of the distance would be one integer."""
    x, screen, tensors = torch.tensor([far, bulk, 0.0]), Screen(), TensorScreen()
    screen.clean(x, "x"), tensors.clean(x, "x")
    assert (screen.mask is not None) is bool(tensors.holds_mask()) is (-far > 256 * bulk)


NUMBERS = st.one_of(
    st.floats(-5, 5, width=32),
    st.sampled_from([-INF, smallest(F32), -1e9, -10000.0, -1001.0, -1000.0, 0.0]),
)
BATCHES = st.lists(
    st.lists(NUMBERS, min_size=1, max_size=6).map(torch.tensor), min_size=1, max_size=4
)


@settings(max_examples=100)
@example([torch.tensor([1.0, smallest(F32) / 4])])
@given(batches=BATCHES)
def test_a_screen_of_tensors_sees_what_one_of_numbers_sees(batches: list[Tensor]) -> None:
    ours, known = TensorScreen(), Screen()
    for batch in batches:
        one, other = ours.clean(batch, "x"), known.clean(batch, "x")
        assert torch.equal(one.values, other.values)
        assert (float(one.low), float(one.high)) == (float(other.low), float(other.high))
    assert vars(ours.snapshot()) == pytest.approx(vars(known))
    assert bool(ours.holds_mask()) == (known.mask is not None)


def test_a_screen_of_tensors_leaves_nan_out() -> None:
    screen = TensorScreen()
    cleaned = screen.clean(torch.tensor([1.0, math.nan, -2.0]), "x")
    assert (float(cleaned.low), float(cleaned.high)) == (-2.0, 1.0)
    assert (screen.snapshot().masked, screen.snapshot().values) == (0, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, torch.finfo(torch.float32).max])
def test_an_overflow_is_no_mask(bad: float) -> None:
    screen = TensorScreen()
    screen.clean(torch.tensor([1.0, bad, -math.inf]), "x")
    assert not screen.holds_mask()
    assert float(screen.sizes[0]) == 1.0


def test_what_another_has_seen_is_taken() -> None:
    known, screen = Screen(), TensorScreen()
    known.clean(torch.tensor([1.0, -math.inf]), "x")
    screen.take(known)
    assert vars(screen.snapshot()) == vars(known)
    assert bool(screen.holds_mask())
