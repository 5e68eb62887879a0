# SPDX-License-Identifier: Apache-2.0
"""Attention as models write it: what is claimed, what is refused and why, what it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose.program.decompositions import same_layout
from qompose.reporting.report_data import FLOAT_KERNEL, KERNEL
from qompose_x86_inductor.onednn import exactness
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from tests.core.toy import Model, randn, sqnr
from tests.products import x86
from tests.sampling import at_once
from tests.x86_inductor.small_models import calls, converted, reasons, rules

sdpa = F.scaled_dot_product_attention
BATCH, LENGTH, HEADS, WIDTH = 2, 9, 2, 16
X, MEMORY = randn(BATCH, LENGTH, HEADS * WIDTH), randn(BATCH, 13, HEADS * WIDTH)
KEPT = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6
ADDED = torch.zeros(KEPT.shape).masked_fill(~KEPT, -math.inf)


def written_out(
    scale: Callable[[Tensor], Tensor] = lambda scores: scores / math.sqrt(WIDTH),
    add: Callable[[Tensor], Tensor] = lambda scores: scores,
    drop: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        scores = add(scale(query @ key.transpose(-1, -2)))
        return drop(torch.softmax(scores + mask[0] if mask else scores, -1)) @ value

    return attend


def net(attend: Callable[..., Tensor], heads: int = HEADS) -> nn.Module:
    """Linears around attention; a second input is memory, or a mask, by its rank."""

    def split(x: Tensor, count: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], count, WIDTH).transpose(1, 2)

    def forward(m: Any, x: Tensor, other: Tensor | None = None) -> Tensor:
        memory = x if other is None or other.dim() != 3 else other
        mask = () if other is None or other.dim() == 3 else (other,)
        given = (m.query(x), m.key(memory), m.value(memory))
        query, key, value = map(split, given, (HEADS, heads, heads))
        return m.out(attend(query, key, value, *mask).transpose(1, 2).reshape(x.shape))

    outer, shared = HEADS * WIDTH, heads * WIDTH
    torch.manual_seed(0)
    return Model(
        forward, query=nn.Linear(outer, outer), key=nn.Linear(outer, shared),
        value=nn.Linear(outer, shared), out=nn.Linear(outer, outer),
    )  # fmt: skip


FORMS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "plain": (net(sdpa), (X,)),
    "booleans": (net(sdpa), (X, KEPT)),
    "added": (net(sdpa), (X, ADDED)),
    "by key": (net(sdpa), (X, KEPT[:, :, :1])),
    "causal": (net(lambda *qkv: sdpa(*qkv, is_causal=True)), (X,)),
    "scaled": (net(lambda *qkv: sdpa(*qkv, scale=0.1)), (X,)),
    "groups": (net(lambda *qkv: sdpa(*qkv, enable_gqa=True), heads=1), (X,)),
    "cross": (net(sdpa), (X, MEMORY)),
    "three axes": (net(lambda *qkv: sdpa(*(x[:, 0] for x in qkv)).repeat(1, 1, 2)[:, None]), (X,)),
    "written out": (net(written_out()), (X,)),
    "written out, cross": (net(written_out()), (X, MEMORY)),
    "factor": (net(written_out(lambda scores: scores * 0.2)), (X,)),
    "unscaled": (net(written_out(lambda scores: scores)), (X,)),
    "mask": (net(written_out()), (X, ADDED.clamp(min=-1e4))),
    "mask first": (
        net(lambda q, k, v, mask: torch.softmax(mask + q @ k.mT * 0.2, -1) @ v),
        (X, ADDED.clamp(min=-9)),
    ),
    "dropout": (net(written_out(drop=lambda w: F.dropout(w, 0.1, training=False))), (X,)),
    "mask in place": (
        net(lambda q, k, v, mask: torch.softmax((q @ k.mT).add_(mask), -1) @ v), (X, ADDED.clamp(min=-9))
    ),
    "bmm": (
        net(lambda *qkv: torch.bmm(
            torch.bmm(qkv[0].flatten(0, 1) * 0.2, qkv[1].flatten(0, 1).transpose(1, 2)).softmax(2),
            qkv[2].flatten(0, 1),
        ).view(qkv[0].shape)), (X,),
    ),
}  # fmt: skip


def lowered_right(result: GraphModule, *inputs: Tensor) -> GraphModule:
    """The lowered model is the Q/DQ model but for integers of attention that become their neighbours.

    One of them in 500 is 27 dB below the step of eight bits, which are some 45 dB.
    """
    lowered = qompose.lower(result)
    with torch.no_grad():
        found, expected = lowered(*inputs), result(*inputs)
    assert found.shape == expected.shape and same_layout(found, expected)
    assert sqnr(expected, found) > 48
    return lowered


@pytest.mark.parametrize(
    "form", at_once([*FORMS], "added", "groups", "cross", "mask first", "dropout", "bmm")
)
def test_each_form_becomes_one_operator(form: str) -> None:
    model, inputs = FORMS[form]
    result = converted(model, *inputs, attention=True)
    claimed = {rule for rule in rules(result).values() if "attention" in rule}
    operator = "attention" if list(FORMS).index(form) < 9 else "attention_written_out"
    assert claimed == {operator}
    lowered = lowered_right(result, *inputs)
    called = calls(lowered)
    assert called.count("qompose_x86.attention") == 1
    assert not {"aten.softmax", "aten.matmul", "aten.bmm"} & set(called)
    assert "quantized_decomposed.dequantize_per_tensor" not in called


def test_without_the_option_it_stays_in_float() -> None:
    result = converted(FORMS["plain"][0], X)
    assert "attention" not in rules(result).values()
    assert "option 'attention'" in reasons(result)


@pytest.mark.parametrize("form", ["plain", "written out"])
def test_training_dropout_and_other_axes_are_refused(form: str) -> None:
    refused: dict[str, tuple[Callable[..., Tensor], str]] = {
        "plain": (lambda *qkv: sdpa(*qkv, dropout_p=0.5), "dropout"),
        "written out": (
            lambda query, key, value: torch.softmax(query @ key.mT, -2) @ value, "not over keys"
        ),
    }  # fmt: skip
    attend, reason = refused[form]
    result = converted(net(attend), X, attention=True)
    assert not any("attention" in rule for rule in rules(result).values())
    assert reason in reasons(result)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "broadcast heads": (
        lambda q, k, v: sdpa(q, k[:, :1], v[:, :1]), "heads of the keys are broadcast",
    ),
    "broadcast batches": (lambda q, k, v: sdpa(q, k[:1], v[:1]), "batches"),
    "a scaled mask": (
        lambda q, k, v: torch.softmax(torch.add(q @ k.mT, q.sum(-1, True), alpha=2), -1) @ v,
        "added to the scores",
    ),
    "booleans that are added": (
        lambda q, k, v: torch.softmax(q @ k.mT + (q @ k.mT > 0), -1) @ v, "torch.bool",
    ),
    "half precision": (
        lambda q, k, v: sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16()).float(), "bfloat16"
    ),
    "five axes": (
        lambda q, k, v: sdpa(q[None], k[None], v[None])[0], "two, three or four dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_kernel_does_not_take_is_refused_with_a_reason(why: str) -> None:
    attend, reason = REFUSED[why]
    result = converted(net(attend), X, attention=True)
    assert not any("attention" in rule for rule in rules(result).values())
    assert reason in reasons(result)


def test_probabilities_that_somebody_reads_stay() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.softmax(query @ key.mT, -1)
        return weights @ value + weights.sum()

    result = converted(net(attend), X, attention=True)
    assert not any("attention" in rule for rule in rules(result).values())
    assert "no pattern of attention_written_out" in reasons(result)


@pytest.mark.parametrize(("exact", "state"), [(True, KERNEL), (False, FLOAT_KERNEL)])
def test_without_vnni_it_is_called_float(
    exact: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = converted(FORMS["plain"][0], X, attention=True, isa="avx2")
    monkeypatch.setattr(exactness, "vnni_exact", lambda: exact)
    monkeypatch.setattr(exactness, "reason", lambda: "" if exact else "the processor has no VNNI")
    rows = qompose.report(qompose.lower(result)).rows
    assert {row.state for row in rows if row.rule == "attention"} == {state}


def test_float_readers_get_floats() -> None:
    model = Model(lambda m, x: sdpa(m.query(x), m.query(x), x).sin(), query=nn.Linear(16, 16))
    inputs = randn(2, 5, 16)
    lowered = lowered_right(converted(model, inputs, attention=True), inputs)
    (call,) = [n for n in lowered.graph.nodes if "attention" in str(n.target)]
    assert call.meta["val"].dtype == torch.float32


def test_any_batch_and_length_saved_and_loaded(tmp_path: Path) -> None:
    model, (x,) = FORMS["causal"]
    batch, length = Dim("batch", min=1, max=9), Dim("length", min=2, max=99)
    config = {"attention": True, "range": "minmax", "balance": False, "algorithms": ()}
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: batch, 1: length},))
    prepared = qompose.prepare_pt2e(exported, x86(**config))
    prepared(x)
    result = qompose.convert_pt2e(prepared)
    qompose.save(result, tmp_path / "model.qompose")
    for model in (result, qompose.load(tmp_path / "model.qompose")):
        for shape in ((1, 2), (5, 31)):
            lowered_right(model, randn(*shape, HEADS * WIDTH) * 0.9)
