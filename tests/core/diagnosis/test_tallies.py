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
    FALLBACK,
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
    assert tally(x, x, x, None).clipping is None


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("equal", EQUAL),
        ("inherited", INHERITED),
        ("last digits", ARITHMETIC),
        ("rounded", ROUNDING),
        ("clipped", CLIPPING),
        ("no kernel", FALLBACK),
        ("wrong kernel", KERNEL_ERROR),
        ("kernel off by a step", ROUNDING),
    ],
)
def test_cause(case: str, cause: str) -> None:
    x = torch.linspace(-9, 9, 50)
    x = torch.cat([x, torch.tensor([40.0])]) if case == "clipped" else x
    rounded = GRID.rounded(x)
    own = {"equal": x, "inherited": x, "last digits": x * (1 + 1e-7)}.get(case, rounded)
    made = tally(x, x + 0.5 if case == "inherited" else own, own)
    if case.startswith("wrong"):
        made.add_kernel(rounded, rounded + 0.25, x)
    if case.startswith("kernel"):
        made.add_kernel(rounded, rounded + 0.1, x)
    assert made.cause(fallback=case == "no kernel") == cause


def test_a_kernel_that_gives_nan_is_wrong() -> None:
    x = torch.ones(3)
    made = tally(x, x, x)
    made.add_kernel(x, torch.tensor([1.0, 1.0, math.nan]), x)
    assert made.cause(fallback=False) == KERNEL_ERROR


def test_masks_are_equal_to_themselves() -> None:
    x = torch.tensor([1.0, -math.inf, math.nan, math.inf])
    assert tally(x, x, x).cause(fallback=False) == EQUAL
    assert tally(x, torch.tensor([1.0, 5.0, math.nan, math.inf]), x).sqnr == -math.inf


@given(st.lists(st.integers(-128, 127), min_size=1, max_size=20), st.integers(-5, 5))
def test_integers_come_back_from_what_they_stand_for(integers: list[int], zero: int) -> None:
    grid = ReaderGrid(0.03, zero, -128, 127)
    given_ = torch.tensor(integers, dtype=torch.int8)
    assert torch.equal(grid.to_integers(grid.to_floats(given_)).to(torch.int8), given_)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "other"])
def test_what_one_of_both_has_no_number_for_is_not_clipping(value: float, side: str) -> None:
    x = torch.linspace(-9, 9, 50)
    odd = torch.where(x > 8, value, x)
    made = tally(*(odd, GRID.rounded(x), GRID.rounded(x)) if side == "reference" else (x, odd, odd))
    assert made.cause(fallback=False) == NOT_FINITE
    assert made.sqnr == made.own_sqnr == -math.inf


def test_what_comes_behind_is_inherited_though_it_has_no_number() -> None:
    x = torch.linspace(-9, 9, 50)
    assert tally(x, torch.where(x > 8, math.nan, x), x).cause(fallback=False) == INHERITED


def test_a_kernel_that_rounds_less_than_its_region_is_not_wrong() -> None:
    """As one whose scales have no least value. Its distance is told, and a value that is worse is enough."""
    x = torch.linspace(-1, 1, 51)
    simulated = x + 0.1 * (-1.0) ** torch.arange(51)  # 25 steps of 1/255
    for worst, cause in (
        (0.0, ROUNDING),
        (0.05, ROUNDING),
        (0.25, KERNEL_ERROR),
        (-0.35, KERNEL_ERROR),
    ):
        own = x * 1.001
        own[20] = x[20] + worst
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


def test_most_of_the_error_has_to_be_of_what_was_cut_off() -> None:
    x = torch.cat([torch.linspace(-9, 9, 50), torch.tensor([14.0])])
    cut = GRID.rounded(x)
    assert tally(x, cut, cut).cause(fallback=False) == CLIPPING
    worse = cut.clone()
    worse[3] += 5.0  # something else adds more
    assert tally(x, worse, worse).cause(fallback=False) == ROUNDING
    slightly = torch.cat([torch.linspace(-9, 9, 50), torch.tensor([12.72])])  # the end is at 12.7
    cut = GRID.rounded(slightly)
    assert tally(slightly, cut, cut).cause(fallback=False) == ROUNDING
    exact = slightly.clamp(max=12.7)  # rounded by nobody, though the grid would
    assert tally(slightly, exact, exact).cause(fallback=False) == ROUNDING


def test_one_input_on_which_a_kernel_is_wrong_is_enough() -> None:
    x = torch.linspace(-9, 9, 50)
    rounded = GRID.rounded(x)
    made = tally(x, rounded, rounded)
    for off in (0.25, 0.0):
        made.add_kernel(rounded, rounded + off, x)
    assert made.cause(fallback=False) == KERNEL_ERROR
    assert made.steps == pytest.approx(2.5)


def test_the_range_is_that_of_all_inputs() -> None:
    made = Tally(GRID)
    for part in (torch.tensor([-6.0, 1.0]), torch.tensor([0.0, 2.0]), torch.tensor([1.0])):
        made.add(part, part, {})
    assert made.range_use == pytest.approx(8.0 / 25.5)
