# SPDX-License-Identifier: Apache-2.0
"""An embedding and the head that is tied to it: one table of integers, whoever reads it, in any order."""

from __future__ import annotations

import itertools
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.core.toy import Model, sqnr

WORDS, WIDTH = 40, 16
PRODUCTS = ("xnnpack", "x86_inductor")
ORDERS = [order for product in PRODUCTS for order in itertools.permutations(("embedding", product))]


def decoder(m: Any, ids: Tensor) -> Tensor:
    """One block: attention and a perceptron, each behind a normalisation."""
    x = m.tokens(ids) + m.places(torch.arange(ids.shape[1]))
    query, key, value = (
        part.unflatten(-1, (2, -1)).transpose(1, 2) for part in m.qkv(m.first(x)).chunk(3, -1)
    )
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + m.out(y.transpose(1, 2).flatten(2))
    x = x + m.down(F.gelu(m.up(m.second(x))))
    return m.head(m.last(x))


IDS = torch.randint(WORDS, (6, 8), generator=torch.Generator().manual_seed(0))


@cache
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    layers = {"tokens": nn.Embedding(WORDS, WIDTH), "places": nn.Embedding(8, WIDTH)}
    layers |= {name: nn.LayerNorm(WIDTH) for name in ("first", "second", "last")}
    sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    layers |= {name: nn.Linear(a * WIDTH, b * WIDTH) for name, (a, b) in sizes.items()}
    model = Model(decoder, **layers, head=nn.Linear(WIDTH, WORDS, bias=False))
    model.head.weight = layers["tokens"].weight
    with torch.no_grad():
        return torch.export.export(model.eval(), (IDS,))


@cache
def quantized(*members: Any, target: str = "torch") -> qompose.QuantizedModel:
    return qompose.quantize(program(), backends=list(members), calibration=[(IDS,)], target=target)


def tables(module: Any) -> dict[str, torch.dtype]:
    """What of the tied table is stored, by name: the only matrices of this shape."""
    state = module.state_dict()
    return {n: t.dtype for n, t in state.items() if tuple(t.shape) == (WORDS, WIDTH)}


pytestmark = pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # regions left simulated


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_one_table_of_integers_in_every_form(order: tuple[str, str]) -> None:
    result = quantized(*order)
    for module in (result.converted, result.model):
        assert tables(module) == {"head.weight_q": torch.int8}
    (note,) = (note for note in result.report.notes if "head.weight" in note)
    assert "embedding (embedding, rule embedding)" in note
    rows = {row.module: row for row in result.report.rows if row.module in ("tokens", "head")}
    assert {path: row.owner for path, row in rows.items()} == {
        "tokens": "embedding",
        "head": next(name for name in order if name != "embedding"),
    }
    states = {path: row.state for path, row in rows.items()}
    assert states == {"tokens": "float kernel on integers", "head": "int8 kernel"}
    with torch.no_grad():
        expected, simulated = program().module()(IDS), result.converted(IDS)
        lowered = result.model(IDS)
    assert sqnr(expected, simulated) > 25
    assert sqnr(simulated, lowered) > 35


@pytest.mark.parametrize("product", PRODUCTS)
def test_order_changes_nothing_but_priority(product: str) -> None:
    one, other = (quantized(*order) for order in (("embedding", product), (product, "embedding")))
    assert torch.equal(one.converted(IDS), other.converted(IDS))
    assert one.report.bytes_after == other.report.bytes_after < 0.45 * one.report.bytes_before


@pytest.mark.full
@pytest.mark.skipif(not find_spec("executorch"), reason="needs executorch")
@pytest.mark.filterwarnings("ignore")  # executorch's own, at import
def test_on_the_executorch_runtime() -> None:
    result = quantized("embedding", "xnnpack", target="executorch")
    outputs = result.model(IDS)
    (output,) = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    assert sqnr(result.converted(IDS), output) > 35
    assert tables(result.converted) == {"head.weight_q": torch.int8}
    rows = {
        r.module: (r.owner, r.state) for r in result.report.rows if r.module in ("tokens", "head")
    }
    assert rows == {
        "tokens": ("embedding", "float kernel on integers"),
        "head": ("xnnpack", "int8 kernel"),
    }
    assert any(f"head.weight_q ({WORDS * WIDTH} bytes)" in note for note in result.report.notes)


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS[:2], ids="-".join)
def test_tune_makes_one_choice_for_the_table(order: tuple[str, str]) -> None:
    with torch.no_grad():
        wanted = program().module()(IDS)

    def metric(model: Any) -> float:
        off = model(IDS).detach() - wanted
        return -float(off.square().sum() / wanted.square().sum())

    quantizer = qompose.compose(*order)
    for most, stored in ((1e-5, torch.float32), (0.1, torch.int8)):
        tuning = qompose.tune(program(), quantizer, [(IDS,)], metric, most, progress=False)
        prepared = qompose.prepare_pt2e(program(), tuning.apply(quantizer))
        converted = qompose.convert_pt2e(qompose.calibrate(prepared, [(IDS,)], progress=False))
        assert list(tables(converted).values()) == [stored]
        assert metric(converted) == pytest.approx(tuning.score)
        assert tuning.score >= -most


def test_three_members_share_one_table() -> None:
    """The head of one backend, all else of another: still one table."""
    linears: list[Any] = [qompose.compose(name).members[0] for name in PRODUCTS]
    config = linears[1].backend.default_config
    linears[1].set_global(None).set_module_name("head", config)
    linears[0].set_module_name("head", None)
    result = quantized(*linears, "embedding")
    assert tables(result.converted) == {"head.weight_q": torch.int8}
    owners = {row.module: row.owner for row in result.report.rows if row.macs}
    assert (owners["head"], owners["up"]) == ("x86_inductor", "xnnpack")
    assert sqnr(program().module()(IDS), result.model(IDS)) > 25
