# SPDX-License-Identifier: Apache-2.0
"""What is summed up of a value, and the cause that the sums point to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from qompose.diagnosis.error_measures import Tally
from qompose.diagnosis.replay import ReaderGrid
from qompose.reporting.report_data import (
    ARITHMETIC,
    CLIPPING,
    EQUAL,
    INHERITED,
    KERNEL_ERROR,
    NOT_FINITE,
    ROUNDING,
)
from torch import Tensor

GRID = ReaderGrid(0.1, 0, -128, 127)


def tally(reference: Tensor, other: Tensor, own: Tensor, grid: ReaderGrid | None = GRID) -> Tally:
    made = Tally(grid)
    made.add(reference, other, {})
    made.add_own(reference, own)
    return made


def cause(reference: Tensor, other: Tensor, own: Tensor | None = None, *kernels: Tensor) -> str:
    """`kernels`: what a kernel gives for each input, where the simulated region gives `own`."""
    own = other if own is None else own
    made = tally(reference, other, own)
    for kernel in kernels:
        made.add_kernel(own, kernel, reference)
    return made.cause(fallback=False)


LINE = torch.linspace(-9, 9, 50)
ROUNDED = GRID.rounded(LINE)
NEARLY = LINE * (1 + 1e-7)
CUT, SLIGHTLY = (
    torch.cat([LINE, torch.tensor([end])]) for end in (14.0, 12.72)
)  # the end is at 12.7


def test_figures_are_those_of_all_inputs_together() -> None:
    x, y = torch.randn(100), torch.randn(100)
    made = Tally(GRID)
    for part in (slice(0, 30), slice(30, 100)):
        made.add(x[part], y[part], {"first": lambda one, other: float(other[0] - one[0])})
    noise = (y - x).double().square().sum()
    assert made.sqnr == pytest.approx(float(10 * torch.log10(x.double().square().sum() / noise)))
    assert made.relative_error == pytest.approx(float(noise.sqrt() / x.double().norm()))
    assert made.figures()["metrics"]["first"] == pytest.approx(
        (float(y[0] - x[0]) + float(y[30] - x[30])) / 2
    )


def test_clipping_and_range_use_are_those_of_the_reference() -> None:
    x = torch.tensor([-20.0, -6.4, 0.0, 1.0, 30.0])
    made = tally(x, x, x)
    assert made.clipping == pytest.approx(2 / 5)
    assert made.range_use == pytest.approx(1.0)
    assert tally(x[2:4], x[2:4], x[2:4]).range_use == pytest.approx(1.0 / 25.5)
    assert tally(x[3:4], x[3:4], x[3:4]).range_use == 0.0
    assert tally(x, x, x, None).clipping is None


def worse(x: Tensor) -> Tensor:
    """Something else adds more than what is cut off."""
    return GRID.rounded(x) + 5.0 * (torch.arange(len(x)) == 3)


ONES, MASK = torch.ones(3), torch.tensor([1.0, -math.inf, math.nan, math.inf])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((LINE, LINE), EQUAL),
        ((MASK, MASK), EQUAL),
        ((LINE, LINE + 0.5, LINE), INHERITED),
        ((LINE, torch.where(LINE > 8, math.nan, LINE), LINE), INHERITED),
        ((0 * LINE, LINE, 0 * LINE), INHERITED),  # of what is to be nothing
        ((LINE, NEARLY), ARITHMETIC),
        ((LINE, ROUNDED), ROUNDING),
        ((LINE, ROUNDED, ROUNDED, ROUNDED + 0.1), ROUNDING),  # a kernel that is off by a step
        ((LINE, ROUNDED, ROUNDED, ROUNDED + 0.25), KERNEL_ERROR),
        ((LINE, ROUNDED, ROUNDED, ROUNDED + 0.25, ROUNDED), KERNEL_ERROR),  # on one input of two
        ((ONES, ONES, ONES, torch.tensor([1.0, 1.0, math.nan])), KERNEL_ERROR),
        ((CUT, GRID.rounded(CUT)), CLIPPING),
        ((CUT, worse(CUT)), ROUNDING),
        ((SLIGHTLY, GRID.rounded(SLIGHTLY)), ROUNDING),
        (
            (SLIGHTLY, SLIGHTLY.clamp(max=12.7)),
            ROUNDING,
        ),  # by nobody, though the grid would round it
    ],
)
def test_cause(values: tuple[Tensor, ...], expected: str) -> None:
    assert cause(*values) == expected


def test_a_number_for_what_has_none_is_an_error_without_bound() -> None:
    assert tally(MASK, torch.tensor([1.0, 5.0, math.nan, math.inf]), MASK).sqnr == -math.inf


@given(st.lists(st.integers(-128, 127), min_size=1, max_size=20), st.integers(-5, 5))
def test_integers_come_back_from_what_they_stand_for(integers: list[int], zero: int) -> None:
    grid = ReaderGrid(0.03, zero, -128, 127)
    given_ = torch.tensor(integers, dtype=torch.int8)
    assert torch.equal(grid.to_integers(grid.to_floats(given_)).to(torch.int8), given_)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "other"])
def test_what_one_of_both_has_no_number_for_is_not_clipping(value: float, side: str) -> None:
    odd = torch.where(LINE > 8, value, LINE)
    made = tally(*(odd, ROUNDED, ROUNDED) if side == "reference" else (LINE, odd, odd))
    assert made.cause(fallback=False) == NOT_FINITE
    assert made.sqnr == made.own_sqnr == -math.inf


def test_a_kernel_that_rounds_less_than_its_region_is_not_wrong() -> None:
    """As one whose scales have no least value. Its distance is told, and a value that is worse is enough."""
    x = torch.arange(-25, 26) / 25
    simulated = x + 0.1 * (-1.0) ** torch.arange(51)  # 25 steps of 1/255
    for worst, cause in (
        (0.0, ROUNDING),
        (0.05, ROUNDING),
        (0.1, ROUNDING),  # as far off as the region, to the other side
        (0.25, KERNEL_ERROR),
        (-0.35, KERNEL_ERROR),
    ):
        own = x * 1.001
        own[25] = worst  # x is 0 there
        made = tally(x, own, own, None)
        made.add_kernel(simulated, own, x)
        assert made.cause(fallback=False) == cause, worst
        assert made.steps is not None
        assert made.steps > 20


def test_a_kernel_that_returns_floats_is_one_step_from_floats_that_are_exact() -> None:
    x = torch.linspace(-1, 1, 51)
    for steps, cause in ((0.9, ROUNDING), (1.1, KERNEL_ERROR)):
        made = tally(x, x + steps / 255, x + steps / 255, None)
        made.add_kernel(x, x + steps / 255, x)
        assert made.cause(fallback=False) == cause
        assert made.steps == pytest.approx(steps, rel=1e-3)


def test_steps_are_those_of_the_worst_input() -> None:
    made = tally(LINE, ROUNDED, ROUNDED)
    for off in (0.25, 0.0):
        made.add_kernel(ROUNDED, ROUNDED + off, LINE)
    assert made.steps == pytest.approx(2.5)


def test_the_range_is_that_of_all_inputs() -> None:
    made = Tally(GRID)
    for part in (torch.tensor([-6.0, 1.0]), torch.tensor([0.0, 2.0]), torch.tensor([1.0])):
        made.add(part, part, {})
    assert made.range_use == pytest.approx(8.0 / 25.5)
