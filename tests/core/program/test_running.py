# SPDX-License-Identifier: Apache-2.0
"""Control flow in plain Python computes what torch's operators do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.program.control_flow import RUNNERS, run_cond, run_map, run_scan, run_while_loop
from torch import Tensor
from torch._higher_order_ops.map import map as _  # noqa: F401 - registers the operator
from torch._higher_order_ops.scan import scan as _scan  # noqa: F401

from tests.core.toy import randn

control = torch.ops.higher_order
W = randn(4, 4, seed=1)
LENGTHS = st.integers(min_value=1, max_value=6)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """With them, torch's operators trace their bodies."""
    with torch.no_grad():
        yield


def assert_same(ours: Any, torchs: Any) -> None:
    assert len(ours) == len(torchs)
    for one, other in zip(ours, torchs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def plus(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x @ w, x.sum())


def minus(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x - w, x.amax())


@pytest.mark.parametrize("predicate", [True, False, torch.tensor(True), torch.tensor([[False]])],
                         ids=["true", "false", "tensor", "tensor of one value"])  # fmt: skip
def test_cond(predicate: Any) -> None:
    """A predicate that is a number's comparison with a constant is a plain bool."""
    operands = (randn(4, 4), W)
    assert_same(run_cond(predicate, plus, minus, operands),
                control.cond(predicate, plus, minus, operands))  # fmt: skip


@pytest.mark.parametrize("times", [0, 1, 5])
def test_while_loop(times: int) -> None:
    def unfinished(count: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return count < times

    def step(count: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, torch.tanh(x @ w)

    arguments = (unfinished, step, (torch.tensor(0), randn(2, 4)), (W,))
    result = run_while_loop(*arguments)
    assert int(result[0]) == times
    assert_same(result, control.while_loop(*arguments))


def cell(first: Tensor, second: Tensor, x: Tensor, y: Tensor, w: Tensor) -> list[Any]:
    first = torch.tanh(first @ w + x)
    return [first, second + y, first * 2, x.sum(), (y > 0).any()]


@settings(max_examples=10)
@given(length=LENGTHS)
def test_scan(length: int) -> None:
    """Two carried values, two sliced inputs, three stacked outputs of different ranks and types."""
    with torch.no_grad():
        carried, slices = [randn(4), randn(3)], [randn(length, 4), randn(length, 3, seed=2)]
        result = run_scan(cell, carried, slices, [W])
        assert_same(result, control.scan(cell, carried, slices, (W,)))
        assert [tuple(t.shape) for t in result] == [(4,), (3,), (length, 4), (length,), (length,)]


@settings(max_examples=10)
@given(length=LENGTHS)
def test_map(length: int) -> None:
    def body(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        return [x @ w + y, y.sum(), (x > 0).any()]

    with torch.no_grad():
        slices = (randn(length, 4), randn(length, 4, seed=2))
        assert_same(run_map(body, slices, (W,)), control.map_impl(body, slices, (W,)))
        doubled, nothing = run_map(lambda x: [2 * x, None], [slices[0]], [])
        assert torch.equal(doubled, 2 * slices[0]) and nothing is None


def test_carried_values_given_are_left_alone() -> None:
    start, x = randn(4), randn(5, 4)
    before = start.clone()
    run_scan(lambda c, x: [c + x, c], [start], [x], [])
    run_while_loop(lambda c: c.sum() < 100, lambda c: (c + 10,), (start,), ())
    assert torch.equal(start, before)


def test_bodies_see_real_tensors_with_gradients_enabled() -> None:
    """Which is what the functions are for: an observer reads values."""
    seen: list[float] = []

    def body(x: Tensor) -> tuple[Tensor]:
        seen.append(float(x.detach().sum()))
        return (x * 2,)

    with torch.enable_grad():
        x = randn(3).requires_grad_()
        run_cond(torch.tensor(True), body, body, (x,))
        run_map(body, (x,), ())
        run_scan(lambda c, x: [*body(c), x], [x], [randn(2, 3)], [])
        run_while_loop(lambda x: x.detach().abs().amax() < 5, body, (x,), ())
    assert len(seen) >= 1 + 3 + 2 + 1


def test_every_operator_that_traces_its_bodies_has_a_function() -> None:
    assert set(RUNNERS) == {control.cond, control.while_loop, control.scan, control.map_impl}
    assert len(set(RUNNERS.values())) == len(RUNNERS)
