# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values in eight bits: what is claimed, what stays in float and why, what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose.errors import ConfigError, UserError
from qompose.reporting.report_data import FLOAT, FLOAT_KERNEL
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as config,
)
from torch import Tensor, nn

from tests.core.toy import export, seeded, sqnr

INPUTS, HEADS, WIDTH, LENGTH, PROMPT = 32, 2, 64, 12, 5
ALONE = config(weight_only=True, cache=True).without("weight")
"""Everything but the cache stays in float."""
Write = Callable[[Tensor, Tensor, Tensor], object]


def copy(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.index_copy_(2, at, rows)


def put(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache[:, :, at] = rows


class Attention(nn.Module):
    """One layer with a cache, which begins with random rows up to `start`."""

    def __init__(self, write: Write = copy, start: float = 0.0) -> None:
        super().__init__()
        self.write, self.linear = write, nn.Linear(INPUTS, 3 * HEADS * WIDTH)
        for name in ("keys", "values"):
            generator = torch.Generator().manual_seed(len(name))
            rows = torch.randn(1, HEADS, LENGTH, WIDTH, generator=generator)
            self.register_buffer(name, start * rows)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        rows = self.linear(x).view(1, len(at), 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        self.write(self.keys, at, rows[1])
        self.write(self.values, at, rows[2])
        seen = torch.arange(LENGTH) <= at[:, None]
        return F.scaled_dot_product_attention(rows[0], self.keys, self.values, seen)


def given(first: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(first)
    return torch.randn(1, size, INPUTS, generator=generator), torch.arange(first, first + size)


def methods_of(model: nn.Module) -> dict[str, Any]:
    return {"prompt": export(model, *given(0, PROMPT)), "token": export(model, *given(PROMPT, 1))}


def converted_of(model: nn.Module, quantization: Any = ALONE) -> dict[str, Any]:
    quantizer = X86InductorQuantizer().set_global(quantization)
    return qompose.convert_pt2e(qompose.prepare_pt2e(methods_of(model), quantizer))


@torch.no_grad()
def run(methods: Any) -> Tensor:
    parts = [methods["prompt"](*given(0, PROMPT)).clone()]
    parts += [methods["token"](*given(place, 1)).clone() for place in range(PROMPT, LENGTH)]
    return torch.cat(parts, 2)


def expected(model: nn.Module) -> Tensor:
    return run({name: program.module() for name, program in methods_of(model).items()})


def buffers(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in model.named_buffers()}


INTEGERS = {
    "keys_int8": torch.int8, "keys_scale": torch.float32,
    "values_int8": torch.int8, "values_scale": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("write", [copy, put])
def test_all_methods_share_integers(write: Write) -> None:
    model = seeded(Attention(write), size=0.2)
    converted = converted_of(model)
    lowered = qompose.lower(converted)
    assert buffers(lowered["token"]).items() >= INTEGERS.items()
    assert lowered["token"].keys_int8 is lowered["prompt"].keys_int8
    actual = run(lowered)
    assert sqnr(expected(model), actual) > 40
    assert sqnr(run(converted), actual) > 110  # but for the order of sums


def test_the_report_counts_it() -> None:
    lowered = qompose.lower(converted_of(seeded(Attention(), size=0.2)))
    report = qompose.report(lowered["token"])
    rows = [row for row in report.rows if row.rule == "cache_index_copy"]
    assert [(row.state, row.mode) for row in rows] == [(FLOAT_KERNEL, "dynamic")] * 2
    elements = 2 * HEADS * LENGTH * WIDTH
    saved = elements * 4 - elements * (WIDTH + 4) // WIDTH
    assert report.bytes_before - report.bytes_after == saved
    assert elements * (WIDTH + 4) // WIDTH <= 0.55 * elements * 2  # of bfloat16
    (note,) = (note for note in report.notes if "keys" in note)
    assert "values" in note
    assert f"{elements * 4:,}" in note


def test_initial_values_are_kept() -> None:
    model = seeded(Attention(start=1.0), size=0.2)
    lowered = qompose.lower(converted_of(model))
    held = lowered["token"]
    found = held.keys_int8 * held.keys_scale
    step = model.keys.abs().amax(-1, keepdim=True) / 127
    assert bool(((found - model.keys).abs() <= 0.501 * step).all())
    one = given(LENGTH - 1, 1)  # which reads them all
    with torch.no_grad():
        assert sqnr(export(model, *one).module()(*one), held(*one)) > 35


def test_a_saved_one_starts_anew(tmp_path: Path) -> None:
    lowered = qompose.lower(converted_of(seeded(Attention(start=1.0), size=0.2)))
    first = run(lowered)
    qompose.save(lowered, tmp_path / "model")
    loaded = qompose.load(tmp_path / "model")
    assert buffers(loaded["prompt"]).items() >= INTEGERS.items()
    assert torch.equal(run(loaded), first)


@pytest.mark.usefixtures("nothing_is_kept")
@pytest.mark.parametrize("mode", ["default", pytest.param("package", marks=pytest.mark.full)])
def test_compiled(mode: str) -> None:
    lowered = qompose.lower(converted_of(seeded(Attention(), size=0.2)))
    compiled = qompose.compile_lowered(lowered, mode)
    assert (
        sqnr(run(lowered), run(compiled)) > 60
    )  # a value halfway between two integers may be either


def twice(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.index_copy_(2, at, rows)
    cache.index_copy_(2, at, rows + 1)


def after_reading(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.index_copy_(2, at, rows + cache[:, :, :1])


def columns(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.index_copy_(3, at, rows[:, :, :1, : len(at)].expand(-1, -1, LENGTH, -1))


def added(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.index_put_(
        [torch.tensor([0]), torch.tensor([0]), at[:1]], rows[0, 0, :1], accumulate=True
    )


def whole(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.copy_(torch.index_copy(cache * 1, 2, at, rows))


def through_a_view(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.view(HEADS, LENGTH, WIDTH).index_copy_(1, at, rows[0])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (twice, "writes to keys too"),
        (after_reading, "reads keys before it is written"),
        (columns, "parts of rows"),
        (added, "adds to what is there"),
        (whole, "the buffer keys"),
        (through_a_view, "not a buffer"),
    ],
)
def test_other_writes_stay_in_float_and_reports_say_why(write: Write, words: str) -> None:
    model = seeded(Attention(write), size=0.2)
    quantizer = X86InductorQuantizer().set_global(ALONE)
    at = given(0, PROMPT)
    with pytest.warns(qompose.QomposeWarning):  # nothing was quantized
        prepared = qompose.prepare_pt2e(export(model, *at), quantizer)
    lowered = qompose.lower(qompose.convert_pt2e(prepared))
    assert buffers(lowered)["keys"] is torch.float32
    rows = [row for row in qompose.report(lowered).rows if words in row.reason]
    assert rows
    assert {row.state for row in rows} == {FLOAT}


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # one of them is not quantized
def test_methods_that_disagree_are_refused() -> None:
    quantizers = (X86InductorQuantizer().set_global(c) for c in (ALONE, None))
    programs = methods_of(seeded(Attention(), size=0.2)).items()
    converted = {
        name: qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
        for (name, program), quantizer in zip(programs, quantizers, strict=True)
    }
    with pytest.raises(UserError, match=r"method 'prompt' .*'keys'.*'token'"):
        qompose.lower(converted)


@pytest.mark.parametrize(
    "words", [{}, {"is_dynamic": True}, {"weight_only": True, "group_size": 32}]
)
def test_it_goes_with_any_mode_and_only_if_asked(words: dict[str, Any]) -> None:
    model = seeded(Attention(), size=0.2)
    for cache in (False, True):
        quantizer = X86InductorQuantizer().set_global(config(**words, cache=cache))
        found = qompose.prepare_pt2e(export(model, *given(0, PROMPT)), quantizer)
        rules = {row.rule for row in qompose.report(found).rows}
        assert ("cache_index_copy" in rules) == cache


def test_not_for_training() -> None:
    with pytest.raises(ConfigError, match="training"):
        X86InductorQuantizer().set_global(config(is_qat=True, cache=True))
