# SPDX-License-Identifier: Apache-2.0
"""The embedding backend: byte rows, lookups that touch only their rows, indices that stay indices."""

from __future__ import annotations

import pytest
import qompose
import torch
from qompose.spec import qdq
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from torch import Tensor, nn

from tests.core.toy import Model
from tests.embedding.test_bags import converted
from tests.zoo import by_name

WORDS, WIDTH = 50, 8


def text() -> nn.Module:
    torch.manual_seed(0)
    return Model(
        lambda m, ids: m.words(ids) + m.places(m.order),
        words=nn.Embedding(WORDS, WIDTH, padding_idx=0),
        places=nn.Embedding(16, WIDTH),
        order=nn.Buffer(torch.arange(4)),
    ).eval()


IDS = torch.tensor([[3, 0, 49, 7], [1, 1, 2, 48]])


def bound(table: Tensor) -> float:
    """Half a step of the widest row, and a little for rounding."""
    spread = table.detach().amax(1) - table.detach().amin(1)
    return float(spread.max()) / 255 * 0.51


def test_the_quantizer_takes_every_table_without_calibration() -> None:
    model = text()
    found = converted(model, (IDS,))
    tables = {n: t for n, t in found.state_dict().items() if t.dtype is torch.uint8}
    assert {name: tuple(t.shape) for name, t in tables.items()} == {
        "words.weight_q": (WORDS, WIDTH), "places.weight_q": (16, WIDTH),
    }  # fmt: skip
    assert not any(n.endswith(".weight") for n in found.state_dict())
    limit = bound(model.words.weight) + bound(model.places.weight)
    assert float((model(IDS).detach() - found(IDS)).abs().max()) <= limit


def test_a_lookup_dequantizes_its_rows_and_no_table() -> None:
    lowered = qompose.lower(converted(text(), (IDS,)))
    assert not [n for n in lowered.graph.nodes if qdq.is_dequantize(n)]
    for node in lowered.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and value.dim() >= 2:
            assert WORDS not in value.shape, f"{node} computes on the whole table"


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_indices_are_never_annotated_nor_changed(kind: torch.dtype) -> None:
    model = text()
    prepared = qompose.prepare_pt2e(
        torch.export.export(model, (IDS.to(kind),)), EmbeddingQuantizer()
    )
    plan = prepared.meta["qompose"].plan
    assert {point.source for group in plan.groups for point in group.points} == {
        "words_weight", "places_weight",
    }  # fmt: skip
    assert torch.equal(prepared(IDS.to(kind)), model(IDS.to(kind)))
    assert torch.equal(
        qompose.lower(qompose.convert_pt2e(prepared))(IDS.to(kind)),
        qompose.lower(converted(model, (IDS,)))(IDS),
    )


def test_integer_arithmetic_before_a_lookup_stays() -> None:
    model = by_name("shifted_ids")
    program, inputs = model.export(), model.inputs()
    prepared = qompose.prepare_pt2e(program, EmbeddingQuantizer())
    lowered = qompose.lower(qompose.convert_pt2e(prepared))
    expected, actual = program.module()(*inputs), lowered(*inputs)
    assert torch.equal(expected[1], actual[1])
    assert expected[1].dtype is actual[1].dtype is torch.int32


ROWS = {
    "constant": torch.full((WIDTH,), 3.0), "zero": torch.zeros(WIDTH),
    "positive": torch.linspace(5.0, 6.0, WIDTH), "negative": torch.linspace(-6.0, -5.0, WIDTH),
    "small": torch.linspace(-1e-4, 1e-4, WIDTH), "huge": torch.linspace(-1e6, 1e6, WIDTH),
    "one outlier": torch.tensor([0.0] * (WIDTH - 1) + [100.0]),
}  # fmt: skip


def test_each_row_has_a_range_of_its_own() -> None:
    """Not widened to contain zero, and not widened by the other rows of the table."""
    model = nn.Embedding(len(ROWS), WIDTH)
    model.weight.data = torch.stack(list(ROWS.values()))
    config = get_embedding_quantization_config(eps=1e-12)
    lowered = qompose.lower(converted(model, (torch.tensor([0, 1]),), config))
    for index, (name, row) in enumerate(ROWS.items()):
        actual = lowered(torch.tensor([index, 0])).detach()[0]
        spread, size = float(row.max() - row.min()), float(row.abs().max())
        assert float((actual - row).abs().max()) <= 0.51 * spread / 255 + 1e-5 * size, name
