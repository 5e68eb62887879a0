# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: accuracy of each on its own rows, what calibration sees of it, what is said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.algorithms import blocks, products
from qompose.errors import QomposeWarning
from qompose.observers.input_sums import Columns
from qompose.testing.fixtures import sqnr
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as x86,
)
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

pytest.importorskip("transformers.integrations.moe")  # grouped products of float32

EXPERTS, WIDTH, INNER, ROWS = 4, 32, 64, 64
EVEN = torch.arange(ROWS // EXPERTS, ROWS + 1, ROWS // EXPERTS, dtype=torch.int32)
WITHOUT_2 = torch.tensor([20, 40, 40, ROWS], dtype=torch.int32)
FEW_BITS = {"weight_only": True, "group_size": 32}


class Mixture(nn.Module):
    """Experts of rows that come in groups."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(EXPERTS, WIDTH, INNER, generator=generator)
        down = torch.randn(EXPERTS, INNER, WIDTH, generator=generator)
        self.up, self.down = nn.Parameter(up / WIDTH**0.5), nn.Parameter(down / INNER**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        product = torch.ops.transformers.grouped_mm_fallback
        result: Tensor = product(F.silu(product(x, self.up, ends)), self.down, ends)
        return result


BASES = torch.randn(EXPERTS, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def rows(seed: int, ends: Tensor = EVEN) -> tuple[Tensor, Tensor]:
    """Rows of experts of which each has a space of its own, with little of the others'."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
    spaces = BASES.repeat_interleave(sizes, 0)
    inside = torch.einsum("nk,nkw->nw", torch.randn(ROWS, 6, generator=generator), spaces)
    return inside + 0.1 * torch.randn(ROWS, WIDTH, generator=generator), ends


def prepared(config: QuantizationConfig) -> GraphModule:
    program = torch.export.export(Mixture().eval(), rows(0))
    return qompose.prepare_pt2e(program, X86InductorQuantizer().set_global(config))


def calibrated(config: QuantizationConfig, ends: Tensor = EVEN) -> GraphModule:
    return qompose.calibrate(prepared(config), [rows(seed, ends) for seed in range(8)])


def by_expert(converted: GraphModule) -> list[float]:
    """SQNR of each expert on the rows that are routed to it, dB."""
    given = rows(100)
    wanted, found = Mixture()(*given).detach(), converted(*given)
    return [sqnr(*pair) for pair in zip(wanted.chunk(EXPERTS), found.chunk(EXPERTS), strict=True)]


def notes(converted: GraphModule, *words: str) -> list[str]:
    found = qompose.report(converted)
    lines = (*found.notes, *found.rewrites)
    return [line for line in lines if all(word in line for word in words)]


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 31.0),
        ({"is_dynamic": True}, 33.0),
        ({"weight_only": True}, 39.0),
        (FEW_BITS, 17.0),
        ({**FEW_BITS, "algorithms": ("gptq",)}, 27.0),
        ({**FEW_BITS, "algorithms": ("gptq_sequential",)}, 27.0),
    ],
    ids=["static", "dynamic", "8 bits", "4 bits", "gptq", "gptq_sequential"],
)
def test_each_expert_is_close_on_its_own_rows(options: Any, least: float) -> None:
    converted = qompose.convert_pt2e(calibrated(x86(**options)))
    assert min(by_expert(converted)) >= least
    assert min(by_expert(qompose.lower(converted))) >= least
    assert not notes(converted, "routed")


@pytest.mark.parametrize("word", ["gptq", "gptq_sequential"])
def test_rounding_goes_by_the_rows_of_the_expert(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts read all rows, and only what they make of theirs counts."""
    config = x86(**FEW_BITS, algorithms=(word,))
    own = by_expert(qompose.convert_pt2e(calibrated(config)))
    monkeypatch.setattr(products, "expert_of", lambda product: None)
    monkeypatch.setattr(blocks, "routed", lambda product: None)
    of_all = by_expert(qompose.convert_pt2e(calibrated(config)))
    assert all(one >= other + 4.0 for one, other in zip(own, of_all, strict=True))


def moments(statistics: qompose.Statistics) -> dict[Columns, Any]:
    """Those of the input of the first product."""
    return {seen.columns: seen for site, seen in statistics.moments if site.operator == "input"}


GPTQ = x86(**FEW_BITS, algorithms=("gptq",))


def test_moments_of_experts_are_those_of_their_rows() -> None:
    found = moments(qompose.statistics(calibrated(GPTQ, WITHOUT_2)))
    given = torch.stack([rows(seed, WITHOUT_2)[0] for seed in range(8)]).double()
    parts = given.tensor_split(WITHOUT_2[:-1].long(), dim=1)
    for expert, part in enumerate(parts):
        seen = found[Columns(1, expert=expert)]
        wanted = torch.einsum("bnk,bnl->kl", part, part)
        torch.testing.assert_close(seen.total.sum(0)[0], wanted)
        assert int(seen.count.sum()) == part.shape[0] * part.shape[1]


def test_statistics_merge_where_an_expert_had_no_rows(tmp_path: Path) -> None:
    one, other = (qompose.statistics(calibrated(GPTQ, ends)) for ends in (EVEN, WITHOUT_2))
    merged = one.merged(other)
    expert = Columns(1, expert=2)
    assert torch.equal(moments(merged)[expert].total, moments(one)[expert].total)
    other.save(tmp_path / "seen.safetensors")
    again = prepared(GPTQ)
    qompose.Statistics.load(tmp_path / "seen.safetensors").apply(again)
    assert not qompose.statistics(again).diff(other)
    assert notes(qompose.convert_pt2e(again), "routed no rows", "experts 2 of")


@pytest.mark.parametrize(
    "options",
    [{}, {**FEW_BITS, "algorithms": ("gptq",)}, {**FEW_BITS, "algorithms": ("gptq_sequential",)}],
    ids=["static", "gptq", "gptq_sequential"],
)
def test_an_expert_without_rows_is_named_and_rounded_to_nearest(options: Any) -> None:
    converted = qompose.convert_pt2e(calibrated(x86(**options), WITHOUT_2))
    named = notes(converted, "routed no rows", "experts 2 of")
    assert len(named) == 2  # of both products
    for word in options.get("algorithms", ()):
        assert len(notes(converted, f"{word} was not applied", "_expert_2")) == 2
        nearest = by_expert(qompose.convert_pt2e(prepared(x86(**FEW_BITS))))
        assert by_expert(converted)[2] >= nearest[2] - 0.2
    assert by_expert(converted)[2] >= (19.0 if options else 31.0)


def test_channels_are_scaled_by_the_experts_that_had_rows() -> None:
    converted = qompose.convert_pt2e(calibrated(x86(**FEW_BITS, algorithms=("awq",)), WITHOUT_2))
    assert not notes(converted, "never saw")


def test_what_no_data_decides_says_nothing_of_data() -> None:
    converted = qompose.convert_pt2e(calibrated(x86(is_dynamic=True), WITHOUT_2))
    assert not notes(converted, "routed")


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e37])
def test_what_another_expert_computes_changes_nothing(value: float) -> None:
    """It is computed of all rows, and taken for none of theirs, even if it is infinite or not a number."""
    model, given = Mixture().eval(), rows(3)
    wanted = model(*given).detach().chunk(EXPERTS)
    model.down.data[1] = value
    quantizer = X86InductorQuantizer().set_global(x86(is_dynamic=True))
    forms = [qompose.prepare_pt2e(torch.export.export(model, given), quantizer)]
    if math.isfinite(value):
        forms += [converted := qompose.convert_pt2e(forms[0]), qompose.lower(converted)]
    for form, least in zip(forms, (100.0, 30.0, 30.0), strict=False):  # seven bits without VNNI
        found = form(*given).chunk(EXPERTS)
        assert all(sqnr(wanted[expert], found[expert]) >= least for expert in (0, 2, 3))
        assert not found[1].isfinite().all()


def test_training_says_that_experts_are_left() -> None:
    program = torch.export.export(Mixture().eval(), rows(0))
    with pytest.warns(QomposeWarning):  # nothing else is there
        trained = qompose.prepare_qat_pt2e(program, X86InductorQuantizer().set_global(x86()))
    report = qompose.report(trained)
    (line,) = (note for note in report.notes if "split_experts was not applied" in note)
    assert "grouped_mm_fallback, grouped_mm_fallback_1" in line and "prepare_pt2e" in line
    left = [row for row in report.rows if "grouped_mm" in row.operator]
    assert [row.macs for row in left] == [ROWS * WIDTH * INNER] * 2
    assert all("split_experts" in row.reason for row in left)


class Half(Mixture):
    """Of bfloat16, by torch's own operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.up, offs=ends)


def test_the_reason_is_that_of_the_products_and_not_of_what_finds_their_rows() -> None:
    given = rows(0)[0].bfloat16(), EVEN
    program = torch.export.export(Half().eval(), given)
    with pytest.warns(QomposeWarning):
        found = qompose.prepare_pt2e(program, X86InductorQuantizer().set_global(x86()))
    (row,) = qompose.report(found).rows
    assert "bfloat16" in row.reason and row.macs == ROWS * WIDTH * INNER
