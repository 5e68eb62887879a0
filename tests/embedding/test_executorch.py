# SPDX-License-Identifier: Apache-2.0
"""Tables on the real ExecuTorch runtime: lookups of 8, 4 and 2 bits, and bags of one length."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from torch import Tensor, nn

from tests.core.toy import Model
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import in_two_programs

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
    for bits, symmetric, group in (
        *((8, False, None), (8, True, 4), (4, False, 4)),
        *((4, True, None), (2, False, None), (2, True, 4)),
    )
]


def both(width: int = 12, **options: Any) -> nn.Module:
    """Lookups in matrices and lists, and a bag, so that one program tries all."""
    torch.manual_seed(0)
    return Model(
        lambda m, ids: torch.cat([m.words(ids).mean(1), m.bag(ids), m.words(ids[0])]),
        words=nn.Embedding(ROWS, width),
        bag=nn.EmbeddingBag(ROWS, width, **options),
    )


IDS = torch.tensor([[3, 0, 5, 0], [0, 0, 0, 0], [7, 7, 1, 2]])
DEFAULT = FORMS[0]
CASES: dict[str, tuple[nn.Module, Tensor, QuantizationConfig]] = {
    **{f"form {config}": (both(mode="sum"), IDS, config) for config in FORMS},
    "mean": (both(mode="mean"), IDS, DEFAULT),
    "max": (both(mode="max"), IDS, DEFAULT),
    "mean with padding": (both(mode="mean", padding_idx=0), IDS, DEFAULT),
    "max with padding": (both(mode="max", padding_idx=0), IDS, DEFAULT),
    **{
        f"{bits} bits, width {width}": (
            both(width), IDS.int() if width > 1 else IDS, get_embedding_quantization_config(bits)
        )
        for bits, width in ((8, 1), (4, 7), (2, 7))
    },
    "bfloat16": (nn.Embedding(ROWS, 8, dtype=torch.bfloat16), IDS, DEFAULT),
}  # fmt: skip


AT_ONCE = (f"form {FORMS[5]}", "mean with padding", "4 bits, width 7")


def quantized(name: str) -> Any:
    model, ids, config = CASES[name]
    return converted(model, (ids,), config)


methods = in_two_programs(CASES, AT_ONCE, quantized)


@pytest.mark.parametrize("name", at_once(CASES, *AT_ONCE))
def test_runs_as_simulated(name: str) -> None:
    model, method = methods(name)
    _, ids, _ = CASES[name]
    for given in (ids, (ids * 7 + 3) % ROWS):
        wanted, found = model(given), run(method, given)
        assert found.dtype is wanted.dtype
        bound = 1e-5 if wanted.dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    rows = [row for row in qompose.report(method).rows if row.owner == "embedding"]
    assert {row.state for row in rows} == {"float kernel on integers"}


def test_weights_of_bags_and_batches_that_vary() -> None:
    bag = nn.EmbeddingBag(ROWS, 8, mode="sum")
    weighted = Model(lambda m, ids, weights: m.bag(ids, per_sample_weights=weights), bag=bag)
    batch = torch.export.Dim("batch", max=8)
    inputs = torch.randint(ROWS, (3, 4)), torch.rand(3, 4)
    quantized = converted(weighted, inputs, FORMS[0], dynamic_shapes=({0: batch}, {0: batch}))
    program = qompose.lower(quantized, "executorch")
    for number in (1, 3, 8):
        inputs = torch.randint(ROWS, (number, 4)), torch.rand(number, 4)
        torch.testing.assert_close(run(program, *inputs), quantized(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", at_once(FORMS[::2], FORMS[4]), ids=str)
def test_an_index_out_of_range_is_an_error_of_the_program(config: QuantizationConfig) -> None:
    """ExecuTorch's lookups of 8 bits end the process, and those of 4 and 2 bits read past the table."""
    ids = torch.randint(ROWS, (3, 4))
    batch = torch.export.Dim("batch", max=9)
    quantized = converted(both(mode="sum"), (ids,), config, dynamic_shapes=({0: batch},))
    program = qompose.lower(quantized, "executorch")
    for bad in (ROWS, -1, 2**40):
        with pytest.raises(qompose.QomposeError, match="0x12"):  # ExecuTorch's invalid argument
            program(torch.where(torch.arange(4) == 3, bad, ids))
    torch.testing.assert_close(run(program, ids[:2]), quantized(ids[:2]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "inputs", "config", "rule"),
    [
        (nn.EmbeddingBag(ROWS, 8, mode="sum"), (torch.tensor([1, 2, 3]), torch.tensor([0, 2])),
         FORMS[0], "embedding_bag"),
        (nn.Embedding(ROWS, 9), (IDS,), get_embedding_quantization_config(4, group_size=3), "embedding"),
    ],
    ids=["bags of several lengths", "groups that do not fill whole bytes"],
)  # fmt: skip
def test_what_the_runtime_does_not_have_is_refused_with_the_reason(
    model: nn.Module, inputs: Any, config: QuantizationConfig, rule: str
) -> None:
    with pytest.raises(qompose.errors.TargetError, match=rf"rule {rule}\)"):
        qompose.lower(converted(model, inputs, config), "executorch")


def test_without_executorch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, name = (
        importlib.import_module("executorch.exir.passes"),
        "_quant_patterns_and_replacements",
    )
    monkeypatch.delattr(passes, name, raising=False)
    monkeypatch.setitem(sys.modules, f"executorch.exir.passes.{name}", None)
    with pytest.raises(qompose.errors.TargetError, match="pip install executorch"):
        qompose.lower(converted(nn.Embedding(ROWS, 8), (IDS,), FORMS[0]), "executorch")
