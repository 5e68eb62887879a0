# SPDX-License-Identifier: Apache-2.0
"""Rules for what writes to a buffer, and kernels that keep what is written in a form of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec
from qompose.backend import Kernel, NotLowerable, OperatorPattern, Region
from qompose.errors import UserError
from qompose.observers import PlaceholderObserver
from qompose.program.meta import STAGE_KEY
from qompose.reporting.report_data import SIMULATED
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import DYNAMIC, Model, aten, claimed, export, rule, sqnr, toy

WIDTH, LENGTH = 8, 6
ROWS = QuantizationSpec(
    torch.int8, PlaceholderObserver, -128, 127, torch.per_channel_symmetric, is_dynamic=True,
    block_size=(-1,),
)  # fmt: skip


def in_halves(region: Region) -> Node:
    """Keep a buffer as float16."""
    path, values = region.take_over(region.argument("output", "self"))
    held = region.state(f"{path}_halves", values.half())
    rows = region.step(aten.to.dtype, region.dynamic("source").node, torch.float16)
    dim, index = (region.argument("output", name) for name in ("dim", "index"))
    region.step(aten.index_copy_.default, held, dim, index, rows)
    return region.call(aten.to.dtype, held, torch.float32)


WRITE = rule(
    "write", OperatorPattern((aten.index_copy_.default,)), activations=("source",), state="self",
    output=False, modes=frozenset({"dynamic"}), own={"activation": ROWS},
    kernels={"torch": Kernel("halves", in_halves, float_output=True)},
)  # fmt: skip


class Memory(nn.Module):
    """Keeps rows that it reads, and gives back all that it has."""

    def __init__(self, write: Callable[[Any, Tensor, Tensor], object] | None = None) -> None:
        super().__init__()
        self.write = write or (lambda m, x, at: m.seen.index_copy_(0, at, x))
        self.register_buffer("seen", torch.full((LENGTH, WIDTH), 0.5))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.write(self, x * 2, at)
        return self.seen * 3


def given(first: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(first)
    return torch.randn(size, WIDTH, generator=generator), torch.arange(first, first + size)


def converted_of(model: nn.Module, *inputs: Tensor, quantizer: Any = None) -> Any:
    quantizer = quantizer or toy(WRITE, config=DYNAMIC)
    return qompose.convert_pt2e(qompose.prepare_pt2e(export(model, *inputs), quantizer))


def run(methods: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([methods["many"](*given(0, 4)), methods["one"](*given(4, 1))])


PROGRAMS = {"many": export(Memory(), *given(0, 4)), "one": export(Memory(), *given(4, 1))}


def methods() -> Any:
    prepared = qompose.prepare_pt2e(PROGRAMS, toy(WRITE, config=DYNAMIC))
    return qompose.convert_pt2e(prepared)


class TestKernels:
    def test_methods_share_what_a_kernel_keeps(self) -> None:
        converted = methods()
        lowered = qompose.lower(converted)
        assert lowered["many"].seen_halves is lowered["one"].seen_halves
        assert not hasattr(lowered["one"], "seen")
        assert sqnr(run(converted), run(lowered)) > 35  # int8 against float16

    def test_the_record_has_its_first_values(self) -> None:
        lowered = qompose.lower(methods())
        run(lowered)
        state = lowered["one"].meta[STAGE_KEY].state
        assert {name: value.dtype for name, value in state.items()} == {
            "seen_halves": torch.float16
        }
        assert torch.equal(state["seen_halves"], torch.full((LENGTH, WIDTH), 0.5).half())

    def test_comparing_starts_from_them(self) -> None:
        converted = converted_of(Memory(), *given(0, 4))
        lowered = qompose.lower(converted)
        for _ in range(2):
            found = qompose.compare(converted, lowered, [given(0, 4)])
            assert min(row.sqnr for row in found) > 35

    def test_reports_say_it(self) -> None:
        notes = qompose.report(qompose.lower(methods())["one"]).notes
        size = LENGTH * WIDTH
        (note,) = (note for note in notes if "seen" in note)
        assert f"{2 * size:,}" in note
        assert f"{4 * size:,}" in note

    def test_a_program_may_write_and_not_read(self) -> None:
        model = Model(lambda m, x, at: (m.seen.index_copy_(0, at, x), x)[1])
        model.register_buffer("seen", torch.ones(LENGTH, WIDTH))
        x, at = given(1, 2)
        lowered = qompose.lower(converted_of(model, x, at))
        assert torch.equal(lowered(x, at), x)
        assert [name for name, _ in lowered.named_buffers()] == ["seen_halves"]
        assert sqnr(x, lowered.seen_halves[at]) > 35

    @pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
    def test_a_path_that_is_taken_is_left_alone(self) -> None:
        model = Memory()
        model.register_buffer("seen_halves", torch.ones(WIDTH))
        model.write = lambda m, x, at: m.seen.index_copy_(0, at, x + m.seen_halves)
        lowered = qompose.lower(converted_of(model, *given(0, 4)))
        states = {row.state: row.reason for row in qompose.report(lowered).rows}
        assert "seen_halves" in states[SIMULATED]

    @pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
    def test_a_kernel_may_refuse(self) -> None:
        def refuse(region: Region) -> Node:
            region.take_over(region.argument("output", "self"))
            raise NotLowerable("no")

        kernels = {"torch": Kernel("never", refuse, float_output=True)}
        quantizer = toy(replace(WRITE, kernels=kernels), config=DYNAMIC)
        lowered = qompose.lower(converted_of(Memory(), *given(0, 4), quantizer=quantizer))
        assert lowered.seen.dtype is torch.float32

    @pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # one of them is not quantized
    def test_methods_that_do_not_agree_are_refused(self) -> None:
        other = qompose.convert_pt2e(qompose.prepare_pt2e(PROGRAMS["one"], toy(WRITE, config=None)))
        with pytest.raises(UserError, match=r"'many'.*'seen'.*'one'"):
            qompose.lower({"many": methods()["many"], "one": other})


def twice(m: Any, x: Tensor, at: Tensor) -> None:
    m.seen.index_copy_(0, at, x)
    m.seen.add_(1)


def after_a_look(m: Any, x: Tensor, at: Tensor) -> None:
    m.seen.index_copy_(0, at, x + m.seen[:1])


def to_a_view(m: Any, x: Tensor, at: Tensor) -> None:
    m.seen[:, :].index_copy_(0, at, x)


def to_no_buffer(m: Any, x: Tensor, at: Tensor) -> None:
    m.seen.copy_((m.seen * 1).index_copy_(0, at, x))


class TestRules:
    def test_the_buffer_may_be_read_afterwards(self) -> None:
        prepared = qompose.prepare_pt2e(PROGRAMS["one"], toy(WRITE, config=DYNAMIC))
        assert list(claimed(prepared).values()) == [("index_copy_",)]

    @pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # nothing is quantized
    @pytest.mark.parametrize("write", [twice, after_a_look, to_a_view, to_no_buffer])
    def test_others_are_not_claimed(self, write: Any) -> None:
        program = export(Memory(write), *given(0, 4))
        prepared = qompose.prepare_pt2e(program, toy(WRITE, config=DYNAMIC))
        assert not claimed(prepared)
        assert torch.equal(prepared(*given(0, 4)), program.module()(*given(0, 4)))
