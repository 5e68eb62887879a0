# SPDX-License-Identifier: Apache-2.0
"""Lookups in every form of table: shapes, widths, float types, compiled and packaged, shared and tied."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.spec import qdq
from qompose_embedding import get_embedding_quantization_config
from qompose_embedding.backend import EmbeddingBackend
from qompose_embedding.bag_operators import lookup_in_graph
from torch import nn

from tests.core.toy import Model
from tests.embedding.test_bags import converted
from tests.sampling import at_once

ROWS = 20
PACKED, PLAIN = "gather packed rows, unpack", "gather rows, dequantize"
FORMS = {
    "8 bits": (get_embedding_quantization_config(), PACKED),
    "8 bits, symmetric": (get_embedding_quantization_config(symmetric=True), PACKED),
    "4 bits": (get_embedding_quantization_config(4), PACKED),
    "4 bits, symmetric": (get_embedding_quantization_config(4, symmetric=True), PACKED),
    "2 bits": (get_embedding_quantization_config(2), PACKED),
    "8 bits in groups": (get_embedding_quantization_config(group_size=4), PLAIN),
    "4 bits in groups": (get_embedding_quantization_config(4, group_size=4), PLAIN),
    "2 bits in groups, symmetric": (
        get_embedding_quantization_config(2, symmetric=True, group_size=6), PLAIN,
    ),
}  # fmt: skip


def table(width: int = 12, **options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, width, **options)


SHAPES = ((), (1,), (5,), (2, 3), (2, 1, 4))
ODD = itertools.product(("8 bits", "4 bits", "2 bits"), ((3,), (2, 2)), (1, 3, 6, 7))


@pytest.mark.parametrize(
    ("form", "shape", "width"),
    at_once(
        [*itertools.product(FORMS, SHAPES, (12,)), *ODD],
        *((form, (5,), 12) for form in FORMS),
        *((form, each, 12) for form in ("8 bits", "4 bits in groups") for each in ((), (2, 1, 4))),
        *(("8 bits", (2, 2), 7), ("4 bits", (3,), 1), ("4 bits", (2, 2), 7), ("2 bits", (3,), 3)),
    ),
    ids=str,
)
def test_indices_of_any_shape_and_rows_of_any_width(
    form: str, shape: tuple[int, ...], width: int
) -> None:
    config, kernel = FORMS[form]
    ids = torch.randint(ROWS, shape)
    quantized = converted(table(width), (ids,), config)
    lowered = qompose.lower(quantized, strict=True)
    assert [row.kernel for row in qompose.report(lowered).rows] == [kernel]
    assert not [n for n in lowered.graph.nodes if qdq.is_dequantize(n)]
    result, expected = lowered(ids), quantized(ids)
    assert result.shape == (*shape, width) and result.is_contiguous()
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


SOME = ("8 bits", "4 bits", "8 bits in groups", "2 bits in groups, symmetric")


@pytest.mark.parametrize("form", at_once(FORMS, *SOME))
def test_sizes_that_vary_and_indices_out_of_range(form: str) -> None:
    batch, length = torch.export.Dim("batch", max=9), torch.export.Dim("length", max=9)
    ids = torch.randint(ROWS, (3, 4))
    quantized = converted(table(), (ids,), FORMS[form][0], dynamic_shapes=({0: batch, 1: length},))
    lowered = qompose.lower(quantized, strict=True)
    for shape in ((1, 1), (2, 7), (9, 9)):
        ids = torch.randint(ROWS, shape)
        torch.testing.assert_close(lowered(ids), quantized(ids), rtol=1e-5, atol=1e-5)
    for bad in (ROWS, -1, 2**40):
        with pytest.raises(IndexError):
            lowered(torch.tensor([[0, bad], [1, 2]]))


@pytest.mark.parametrize(
    ("form", "mode"),
    at_once(itertools.product(("8 bits", "2 bits", "4 bits in groups"), ("default", "package"))),
)
def test_compiled_and_packaged(form: str, mode: str) -> None:
    batch = torch.export.Dim("batch", max=64)
    model, ids = nn.Sequential(table(dtype=torch.bfloat16), nn.ReLU()), torch.randint(ROWS, (3, 4))
    quantized = converted(model, (ids,), FORMS[form][0], dynamic_shapes=({0: batch},))
    lowered = qompose.lower(quantized)
    compiled = qompose.compile_lowered(lowered, mode)
    for number in (3, 7):
        ids = torch.randint(ROWS, (number, 4))
        assert compiled(ids).dtype is torch.bfloat16
        torch.testing.assert_close(compiled(ids), lowered(ids), rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="bounds"):
        compiled(torch.full_like(ids, ROWS))


@pytest.mark.parametrize("bits", [4, 2])
def test_integer_zero_points_that_rows_cannot_hold_stay_beside_them(bits: int) -> None:
    spec: Any = get_embedding_quantization_config(bits).weight
    spec = qompose.QuantizationSpec(**{**vars(spec), "qscheme": torch.per_channel_affine})
    ids = torch.randint(ROWS, (4,))
    quantized = converted(table(), (ids,), QuantizationConfig(None, None, spec))
    lowered = qompose.lower(quantized, strict=True)
    torch.testing.assert_close(lowered(ids), quantized(ids), rtol=1e-5, atol=1e-5)
    bound = {4: 0.16, 2: 0.10}[bits] * 12 * ROWS * 4 + 8 * ROWS
    assert qompose.report(lowered).bytes_after <= bound


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [None, 4])
def test_several_lookups_share_one_table(bits: int, group_size: int | None) -> None:
    inputs = torch.randint(ROWS, (3,)), torch.randint(ROWS, (2, 4))
    config = get_embedding_quantization_config(bits, group_size=group_size)
    words, bag = nn.Embedding(ROWS, 8), nn.EmbeddingBag(ROWS, 8, mode="sum")
    bag.weight = words.weight
    lookups = Model(lambda m, a, b: (m.words(a), m.words(b), m.bag(b)), words=words, bag=bag)
    quantized = converted(lookups, inputs, config)
    lowered = qompose.lower(quantized, strict=True)
    assert len([t for t in lowered.state_dict().values() if t.dtype is torch.uint8]) == 1
    for actual, wanted in zip(lowered(*inputs), quantized(*inputs), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "group_size", "bound"),
    [(8, None, 0.27), (4, None, 0.16), (4, 32, 0.16), (2, None, 0.10), (2, 32, 0.10)],
)
def test_bytes_of_a_table(bits: int, group_size: int | None, bound: float) -> None:
    model = nn.Embedding(1000, 128)
    ids = torch.randint(1000, (3,))
    config = get_embedding_quantization_config(bits, group_size=group_size)
    report = qompose.report(qompose.lower(converted(model, (ids,), config)))
    assert report.bytes_after <= bound * report.bytes_before


@pytest.mark.parametrize("form", at_once(("8 bits", "4 bits", "2 bits"), "4 bits"))
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch of itself
@pytest.mark.parametrize("shape", [(31,), (4, 8)], ids=["few", "many"])
def test_a_compiler_calls_a_kernel_for_many_rows_and_gathers_few(
    form: str, shape: tuple[int, ...]
) -> None:
    ids = torch.randint(ROWS, shape)
    lowered = qompose.lower(converted(table(), (ids,), FORMS[form][0]))
    graph = copy.deepcopy(lowered)
    for_compiler = EmbeddingBackend().for_compiler(graph)
    targets = {node.target for node in for_compiler.graph.nodes if node.op == "call_function"}
    assert (lookup_in_graph in targets) == (shape != (31,))
    assert (torch.ops.aten.index_select.default in targets) == (shape == (31,))
    assert torch.equal(for_compiler(ids), lowered(ids))
