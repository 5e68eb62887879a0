# SPDX-License-Identifier: Apache-2.0
"""The embedding backend: byte rows, lookups that touch only their rows, indices that stay indices."""

from __future__ import annotations

import time
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.spec import qdq
from qompose_embedding import (
    EmbeddingBackend,
    EmbeddingQuantizer,
    get_default_embedding_quantization_config,
    get_embedding_quantization_config,
)
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.zoo import ZooModel, by_name, tagged

aten = torch.ops.aten
WORDS, WIDTH = 50, 8


class Text(nn.Module):
    def __init__(self, words: int = WORDS, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH, padding_idx=0, dtype=dtype)
        self.places = nn.Embedding(16, WIDTH, dtype=dtype)
        self.register_buffer("order", torch.arange(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(self.order)


def text(words: int = WORDS, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Text(words, dtype).eval()


IDS = torch.tensor([[3, 0, 49, 7], [1, 1, 2, 48]])


def convert(
    model: nn.Module, *inputs: Tensor, quantizer: Any = None, **options: Any
) -> GraphModule:
    program = torch.export.export(model, inputs, **options)
    return qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer or EmbeddingQuantizer()))


def largest_error(model: nn.Module, actual: Tensor, *inputs: Tensor) -> float:
    return float((model(*inputs).detach() - actual).abs().max())


def bound(table: Tensor) -> float:
    """Half a step of the widest row, and a little for rounding."""
    spread = table.detach().amax(1) - table.detach().amin(1)
    return float(spread.max()) / 255 * 0.51


def test_the_quantizer_takes_every_table_without_calibration() -> None:
    model = text()
    converted = convert(model, IDS)
    tables = {n: t for n, t in converted.state_dict().items() if t.dtype is torch.uint8}
    assert {name: tuple(t.shape) for name, t in tables.items()} == {
        "words.weight_q": (WORDS, WIDTH), "places.weight_q": (16, WIDTH),
    }  # fmt: skip
    assert not any(n.endswith(".weight") for n in converted.state_dict())
    limit = bound(model.words.weight) + bound(model.places.weight)
    assert largest_error(model, converted(IDS), IDS) <= limit


def test_the_kernel_is_the_simulated_model() -> None:
    converted = convert(text(), IDS)
    lowered = qompose.lower(converted, strict=True)
    assert torch.allclose(lowered(IDS), converted(IDS), rtol=0, atol=1e-6)
    report = qompose.report(lowered)
    assert report.count("int8 kernel", "embedding") == 2
    assert {row.kernel for row in report.rows if row.owner} == {"gather packed rows, unpack"}


def test_a_lookup_dequantizes_its_rows_and_no_table() -> None:
    lowered = qompose.lower(convert(text(), IDS))
    assert not [n for n in lowered.graph.nodes if qdq.is_dequantize(n)]
    for node in lowered.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and value.dim() >= 2:
            assert WORDS not in value.shape, f"{node} computes on the whole table"


def test_the_cost_does_not_grow_with_the_table() -> None:
    def seconds(words: int) -> float:
        lowered = qompose.lower(convert(text(words), IDS))
        lowered(IDS)
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(20):
                lowered(IDS)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(200_000) < 3 * seconds(200)


@pytest.mark.parametrize("bad", [50, -1, 10**6], ids=str)
@pytest.mark.parametrize("stage", ["converted", "lowered"])
def test_an_index_out_of_range_is_an_index_error(stage: str, bad: int) -> None:
    model: Any = convert(text(), IDS)
    model = qompose.lower(model) if stage == "lowered" else model
    ids = IDS.clone()
    ids.view(-1)[1] = bad
    with pytest.raises(IndexError):
        model(ids)


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
        qompose.lower(convert(model, IDS))(IDS),
    )


def test_integer_arithmetic_before_a_lookup_stays() -> None:
    model = by_name("shifted_ids")
    program, inputs = model.export(), model.inputs()
    prepared = qompose.prepare_pt2e(program, EmbeddingQuantizer())
    lowered = qompose.lower(qompose.convert_pt2e(prepared))
    expected, actual = program.module()(*inputs), lowered(*inputs)
    assert torch.equal(expected[1], actual[1])
    assert expected[1].dtype is actual[1].dtype is torch.int32


@pytest.mark.parametrize("width", [64, 256])
def test_a_table_takes_little_more_than_a_quarter(width: int) -> None:
    model = nn.Embedding(1000, width)
    lowered = qompose.lower(convert(model, IDS))
    report = qompose.report(lowered)
    assert report.bytes_before == 4 * 1000 * width
    assert report.bytes_after == 1000 * width + 2 * 4 * 1000
    assert report.bytes_after / report.bytes_before <= 0.25 + 2 / width + 1e-9


ROWS = {
    "constant": torch.full((WIDTH,), 3.0),
    "zero": torch.zeros(WIDTH),
    "positive": torch.linspace(5.0, 6.0, WIDTH),
    "negative": torch.linspace(-6.0, -5.0, WIDTH),
    "small": torch.linspace(-1e-4, 1e-4, WIDTH),
    "huge": torch.linspace(-1e6, 1e6, WIDTH),
    "one outlier": torch.tensor([0.0] * (WIDTH - 1) + [100.0]),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_row_has_a_range_of_its_own(name: str) -> None:
    """Not widened to contain zero, and not widened by the other rows of the table."""
    model = nn.Embedding(len(ROWS), WIDTH)
    model.weight.data = torch.stack(list(ROWS.values()))
    row = list(ROWS).index(name)
    quantizer = EmbeddingQuantizer(get_embedding_quantization_config(eps=1e-12))
    lowered = qompose.lower(convert(model, IDS % 3, quantizer=quantizer))
    actual = lowered(torch.full_like(IDS, row)).detach()[0, 0]
    spread = float(ROWS[name].max() - ROWS[name].min())
    size = float(ROWS[name].abs().max())
    assert float((actual - ROWS[name]).abs().max()) <= 0.51 * spread / 255 + 1e-5 * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_tables_float_type_is_kept(dtype: torch.dtype) -> None:
    model = text(dtype=dtype)
    converted = convert(model, IDS)
    lowered = qompose.lower(converted)
    for quantized in (converted, lowered):
        assert quantized(IDS).dtype is dtype
        assert largest_error(model, quantized(IDS), IDS) < 0.1


def test_selectors_leave_a_table_in_float() -> None:
    quantizer = EmbeddingQuantizer().set_module_name("places", None)
    lowered = qompose.lower(convert(text(), IDS, quantizer=quantizer))
    rows = {
        row.module: row for row in qompose.report(lowered).rows if row.operator == "aten.embedding"
    }
    assert (rows["words"].state, rows["places"].state) == ("int8 kernel", "float")
    assert "set" in rows["places"].reason or "module name places" in rows["places"].reason
    assert "places.weight" in lowered.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.int16}, "weight is torch.int16, and the kernel takes"),
        ({"qscheme": torch.per_tensor_symmetric}, "per_tensor_symmetric, and the kernel takes"),
        ({"ch_axis": 1}, "weight has channels along 1, and the kernel takes 0"),
    ],
    ids=["int16", "per tensor", "columns"],
)
def test_other_schemes_are_refused_when_they_are_set(change: Any, message: str) -> None:
    spec = get_default_embedding_quantization_config().weight
    assert spec is not None
    other = QuantizationSpec(**{**vars(spec), **change})
    with pytest.raises(qompose.errors.ConfigError, match=message):
        EmbeddingQuantizer().set_global(QuantizationConfig(None, None, other))


def test_the_default_configuration_is_a_value() -> None:
    first, second = (get_default_embedding_quantization_config() for _ in range(2))
    assert first == second
    assert first.mode == "weight-only"
    assert EmbeddingBackend().default_config == first


def test_capabilities() -> None:
    rows = EmbeddingQuantizer().quantization_capabilities()
    assert {row.pattern for row in rows} == {"embedding", "embedding_bag"}
    for row in rows:
        assert (row.backend, row.mode) == ("embedding", "weight-only")
        assert row.targets == ("torch", "executorch")
    assert {row.config for row in rows} == set(EmbeddingBackend().configs)


@pytest.mark.parametrize("model", tagged("embedding", without="transformers"), ids=str)
def test_the_zoos_tables(model: ZooModel) -> None:
    program, inputs = model.export(), model.inputs()
    prepared = qompose.prepare_pt2e(program, EmbeddingQuantizer())
    with torch.no_grad():
        expected = program.module()(*inputs)
        torch.testing.assert_close(prepared(*inputs), expected, rtol=0, atol=0)
        converted = qompose.convert_pt2e(prepared)
        lowered = qompose.lower(converted)
        torch.testing.assert_close(lowered(*inputs), converted(*inputs), rtol=1e-4, atol=1e-5)


def test_dynamic_lengths() -> None:
    length = torch.export.Dim("length", min=1, max=16)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH)).eval()
    converted = convert(model, IDS[0], dynamic_shapes=({0: length},))
    lowered = qompose.lower(converted)
    for size in (1, 5, 16):
        ids = torch.arange(size)
        assert torch.allclose(lowered(ids), converted(ids), rtol=0, atol=1e-6)


def test_compiled() -> None:
    lowered = qompose.lower(convert(text(), IDS))
    compiled = torch.compile(lowered, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS), lowered(IDS))


def test_without_a_runtime_the_target_is_refused() -> None:
    """The backend has kernels for it, and brings no runtime."""
    with pytest.raises(qompose.errors.TargetError, match="executorch"):
        qompose.lower(convert(text(), IDS), "executorch")
