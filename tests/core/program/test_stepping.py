# SPDX-License-Identifier: Apache-2.0
"""A program that is stepped through computes what it computes when it is called, and holds little."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qompose.program.batches import binder
from qompose.program.stepping import Given, Seen, steps
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tests.core.toy import Model, export, randn, seeded
from tests.zoo import tagged

KINDS = {"branches", "scan_cell", "loop", "map_rows", "autocast", "no_grad_region"}
assert {model.name for model in tagged("control_flow")} > KINDS


def stepped(
    program: GraphModule, *args: Any, exchange: Callable[[Seen], Given | None] = lambda _: None
) -> Any:
    """The outputs of a program, each value of which may be exchanged."""
    running, answer = steps(program, binder(program)(*args)), None
    with torch.no_grad():
        while True:
            try:
                answer = exchange(running.send(answer))
            except StopIteration as end:
                return end.value


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=model.name, marks=[] if model.name in KINDS else pytest.mark.full)
        for model in tagged("control_flow")
    ],
)
def test_control_flow_is_what_it_is_when_it_is_called(model: Any) -> None:
    program = model.export().module(check_guards=False)
    wanted = pytree.tree_leaves(program(*model.inputs()))
    found = pytree.tree_leaves(stepped(program, *model.inputs()))
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other)  # torch compiles some of the bodies


def test_readers_take_what_a_value_was_exchanged_for() -> None:
    def twice(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y + 1, y * 2

    program = export(Model(twice), randn(3)).module()
    one, other = stepped(
        program,
        randn(3),
        exchange=lambda seen: Given(torch.zeros(3)) if "exp" in seen.node.name else None,
    )
    assert one.tolist() == [1, 1, 1]
    assert other.tolist() == [0, 0, 0]


def test_a_value_is_held_until_its_last_reader() -> None:
    """Of a chain, the value and what it was computed from; of what nobody reads, nothing."""
    chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    program = export(seeded(chain), randn(2, 4)).module()
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def look(seen: Seen) -> None:
        nonlocal most
        if seen.node.op == "call_function" and isinstance(seen.value, Tensor):
            alive.append(weakref.ref(seen.value))
        gc.collect(0)  # of all generations it would take a second, in a process of many tests
        most = max(most, sum(one() is not None for one in alive))

    stepped(program, randn(2, 4), exchange=look)
    assert len(alive) == 20
    assert most <= 3


def test_autocast_holds_inside_its_region_alone() -> None:
    def cast(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.one(x)
        return y, m.two(x)

    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    program = export(seeded(Model(cast, **layers)), randn(2, 4)).module()
    one, other = stepped(program, randn(2, 4))
    assert one.dtype is torch.bfloat16
    assert other.dtype is torch.float32
