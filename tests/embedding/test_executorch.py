# SPDX-License-Identifier: Apache-2.0
"""Tables on the real ExecuTorch runtime: lookups of 8, 4 and 2 bits, and bags of one length."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from torch import Tensor, nn

pytest.importorskip("executorch")
xnnpack = pytest.importorskip("qompose_xnnpack")
pytestmark = pytest.mark.filterwarnings("ignore")  # ExecuTorch's own

ROWS = 20


def converted(model: nn.Module, inputs: Any, config: QuantizationConfig, **options: Any) -> Any:
    quantizer = qompose.compose(EmbeddingQuantizer(config), xnnpack.XNNPACKQuantizer())
    program = torch.export.export(model.eval(), inputs, **options)
    return qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))


def run(program: Any, *inputs: Any) -> Any:
    result = program(*inputs)
    return result[0] if isinstance(result, (tuple, list)) else result


FORMS = [
    get_embedding_quantization_config(bits, symmetric=symmetric, group_size=group)
    for bits in (8, 4, 2)
    for symmetric in (False, True)
    for group in (None, 4)
]


class Both(nn.Module):
    """Lookups in matrices and lists, and a bag, so that one program tries all."""

    def __init__(self, width: int = 12, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, width)
        self.bag = nn.EmbeddingBag(ROWS, width, **options)

    def forward(self, ids: Tensor) -> Any:
        return torch.cat([self.words(ids).mean(1), self.bag(ids), self.words(ids[0])])


@pytest.mark.parametrize("config", FORMS, ids=str)
def test_every_form_of_table(config: QuantizationConfig) -> None:
    ids = torch.randint(ROWS, (3, 4))
    quantized = converted(Both(mode="sum"), (ids,), config)
    program = qompose.lower(quantized, "executorch")
    rows = [row for row in qompose.report(program).rows if row.owner == "embedding"]
    assert {(row.operator, row.state) for row in rows} == {
        ("aten.embedding", "int8 kernel"), ("aten.embedding_bag.padding_idx", "int8 kernel"),
    }  # fmt: skip
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(ROWS, (3, 4))
        torch.testing.assert_close(run(program, ids), quantized(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"mode": "mean"}, {"mode": "max"}]
    + [{"mode": mode, "padding_idx": 0} for mode in ("sum", "mean", "max")],
    ids=str,
)
def test_modes_of_bags_of_one_length(options: Any) -> None:
    ids = torch.tensor([[3, 0, 5, 0], [0, 0, 0, 0], [7, 7, 1, 2]])
    quantized = converted(Both(**options), (ids,), FORMS[0])
    program = qompose.lower(quantized, "executorch")
    torch.testing.assert_close(run(program, ids), quantized(ids), rtol=1e-5, atol=1e-5)


def test_weights_of_bags_and_batches_that_vary() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(ROWS, 8, mode="sum")

        def forward(self, ids: Tensor, weights: Tensor) -> Any:
            return self.bag(ids, per_sample_weights=weights)

    batch = torch.export.Dim("batch", max=8)
    inputs = torch.randint(ROWS, (3, 4)), torch.rand(3, 4)
    quantized = converted(Weighted(), inputs, FORMS[0], dynamic_shapes=({0: batch}, {0: batch}))
    program = qompose.lower(quantized, "executorch")
    for number in (1, 3, 8):
        inputs = torch.randint(ROWS, (number, 4)), torch.rand(number, 4)
        torch.testing.assert_close(run(program, *inputs), quantized(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_odd_widths_and_kinds_of_indices(bits: int, width: int, kind: torch.dtype) -> None:
    ids = torch.randint(ROWS, (3, 4)).to(kind)
    quantized = converted(Both(width), (ids,), get_embedding_quantization_config(bits))
    program = qompose.lower(quantized, "executorch")
    torch.testing.assert_close(run(program, ids), quantized(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_tables_float_type_is_kept(dtype: torch.dtype) -> None:
    ids = torch.randint(ROWS, (3, 4))
    quantized = converted(nn.Embedding(ROWS, 8, dtype=dtype), (ids,), FORMS[0])
    program = qompose.lower(quantized, "executorch")
    assert run(program, ids).dtype is dtype
    torch.testing.assert_close(run(program, ids), quantized(ids), rtol=1e-2, atol=1e-2)


def test_a_program_shrinks_with_the_bits() -> None:
    sizes = []
    for bits in (8, 4, 2):
        ids = torch.randint(1000, (3,))
        config = get_embedding_quantization_config(bits)
        program = qompose.lower(converted(nn.Embedding(1000, 128), (ids,), config), "executorch")
        sizes.append(qompose.report(program).bytes_after / (1000 * 128 * 4))
    assert sizes[0] < 0.29 and sizes[1] < 0.17 and sizes[2] < 0.11


@pytest.mark.parametrize("config", [FORMS[0], FORMS[5], FORMS[8]], ids=str)
def test_an_index_out_of_range_is_an_error_of_the_program(config: QuantizationConfig) -> None:
    """ExecuTorch's lookups of 8 bits end the process, and those of 4 and 2 bits read past the table."""
    ids = torch.randint(ROWS, (3, 4))
    batch = torch.export.Dim("batch", max=9)
    quantized = converted(Both(mode="sum"), (ids,), config, dynamic_shapes=({0: batch},))
    program = qompose.lower(quantized, "executorch")
    for bad in (ROWS, -1, 2**40):
        with pytest.raises(qompose.QomposeError, match="0x12"):  # "invalid argument"
            program(torch.where(torch.arange(4) == 3, bad, ids))
    torch.testing.assert_close(run(program, ids[:2]), quantized(ids[:2]), rtol=1e-5, atol=1e-5)


def test_bags_of_several_lengths_are_refused_with_the_reason() -> None:
    model = nn.EmbeddingBag(ROWS, 8, mode="sum")
    inputs = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    wanted = (
        r"(?s)have no kernel.*embedding_bag \(embedding, rule embedding_bag\): ExecuTorch has no"
    )
    with pytest.raises(qompose.errors.TargetError, match=wanted):
        qompose.lower(converted(model, inputs, FORMS[0]), "executorch")
