# SPDX-License-Identifier: Apache-2.0
"""Models whose layers live in nested graphs: branches, loops, grad modes and autocast.

All export with `strict=True` too. Regions of `no_grad` are nested graphs only in programs that were
exported with gradients enabled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, net, zoo_model

WIDTH = 6
WORDS = 20
STEPS = 3


def _linear(outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, outputs)


@net(
    wide=lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
    narrow=lambda: nn.Conv2d(3, 4, 1),
    head=lambda: nn.Linear(4, 2),
)
def conv_branches(m: Any, x: Tensor) -> Tensor:
    """Convolutions in both branches, in one of them under a batch norm."""
    y = torch.cond(x.mean() > 0, m.wide, m.narrow, (x,))
    return m.head(y.mean(dim=(2, 3)))


@net(first=_linear, high=_linear, low=_linear, no=_linear)
def nested_branches(m: Any, x: Tensor) -> Tensor:
    """A branch inside a branch, linear layers at every depth."""

    def yes(x: Tensor) -> Tensor:
        y = m.first(x)
        return torch.cond(y.sum() > 0, m.high, m.low, (y,))

    return torch.cond(x.sum() > 0, yes, m.no, (x,))


@net(before=_linear, linear=_linear, after=_linear)
def branch_without_weights(m: Any, x: Tensor) -> Tensor:
    """One branch has a linear layer, the other none and not even an operator on floats."""
    y = m.before(x)
    y = torch.cond(y.amax() > 1.0, m.linear, lambda y: y.clone(), (y,))
    return m.after(y)


@net(linear=_linear)
def branches_share_weight(m: Any, x: Tensor) -> Tensor:
    """One linear layer in both branches, in one of them twice."""
    twice = lambda x: m.linear(F.relu(m.linear(x)))  # noqa: E731
    return torch.cond(x.sum() > 0, twice, lambda x: m.linear(x) - 1.0, (x,))


@net(embedding=lambda: nn.Embedding(WORDS, WIDTH), linear=_linear)
def branch_shares_outside(m: Any, words: Tensor) -> Tensor:
    """A linear layer before the branch and in it; an embedding's table is a branch's weight."""
    y = m.linear(m.embedding(words))
    return torch.cond(
        y.sum() > 0,
        lambda y: F.linear(m.linear(y), m.embedding.weight),
        lambda y: F.pad(y, (0, WORDS - WIDTH)),
        (y,),
    )


@net(left=_linear, right=_linear, last=_linear)
def branch_outputs(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Branches of two operands, one closed over, and two outputs; a second branch reads them."""
    scale = x.abs().amax()
    first, second = torch.cond(
        x.sum() > y.sum(),
        lambda x, y: (m.left(x) / scale, m.right(y)),
        lambda x, y: (m.right(x), x * y),
        (x, y),
    )
    last = torch.cond(second.sum() > 0, m.last, torch.sin, (first,))
    return last, second


@net(before=_linear, body=_linear)
def loop(m: Any, x: Tensor, times: Tensor) -> Tensor:
    """A linear layer applied once more often than an integer input says."""
    _, y = while_loop(
        lambda count, _: count <= times,
        lambda count, y: (count + 1, torch.tanh(m.body(y))),
        (torch.zeros_like(times), m.before(x)),
    )
    return y


@net(body=_linear, gate=_linear)
def loop_two_values(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two values carried, each through a linear layer, until one is large enough."""

    def unfinished(count: Tensor, total: Tensor, y: Tensor) -> Tensor:
        return (count < 5) & (total.abs().amax() < 4.0)

    def step(count: Tensor, total: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.sigmoid(m.gate(total)) * m.body(y)
        return count + 1, total + y, y

    start = torch.zeros((), dtype=torch.int64)
    _, total, y = while_loop(unfinished, step, (start, x.clone(), x.cos()))
    return total, y


@net(grow=_linear, shared=_linear)
def loop_of_branches(m: Any, x: Tensor) -> Tensor:
    """A branch in the body of a loop; one linear layer is used in it and after the loop."""
    _, y = while_loop(
        lambda count, _: count < STEPS,
        lambda count, y: (count + 1, torch.cond(y.sum() > 0, m.shared, m.grow, (y,))),
        (torch.zeros((), dtype=torch.int64), x.clone()),
    )
    return m.shared(y)


@net(inputs=_linear, state=_linear, head=lambda: _linear(2))
def scan_cell(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """An Elman cell over time: its state is carried, its outputs are stacked."""

    def cell(state: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(m.inputs(step) + m.state(state))
        return state, state.clone()

    last, states = scan(cell, torch.zeros_like(x[:, 0]), x, dim=1)
    return m.head(states), last


@net(inputs=lambda: _linear(4 * WIDTH), state=lambda: _linear(4 * WIDTH))
def scan_two_values(m: Any, x: Tensor) -> Tensor:
    """An LSTM cell over time, carrying its two states."""

    def cell(carry: tuple[Tensor, Tensor], step: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        hidden, memory = carry
        gates = m.inputs(step) + m.state(hidden)
        let_in, forget, update, out = gates.chunk(4, dim=-1)
        memory = forget.sigmoid() * memory + let_in.sigmoid() * update.tanh()
        hidden = out.sigmoid() * memory.tanh()
        return (hidden, memory), hidden.clone()

    start = torch.zeros_like(x[:, 0])
    _, states = scan(cell, (start, start.clone()), x, dim=1)
    return states


@net(row=_linear, shared=_linear)
def map_rows_net(m: Any, x: Tensor, scale: Tensor) -> Tensor:
    """Two linear layers applied to every row of the batch by `map`, one of them after it too."""
    body = lambda row, scale: F.relu(m.row(row)) * scale + m.shared(row)  # noqa: E731
    return m.shared(map_rows(body, x, scale))


@net(first=_linear, second=_linear)
@torch.no_grad()
def frozen_encoder(m: Any, x: Tensor) -> Tensor:
    """Never trained."""
    return m.second(F.relu(m.first(x)))


@net(before=_linear, frozen=frozen_encoder, head=lambda: _linear(2))
def no_grad_method(m: Any, x: Tensor) -> Tensor:
    """A frozen encoder whose own `forward` is decorated, between layers that are not."""
    return m.head(m.frozen(m.before(x)) + x)


@net(linear=_linear, head=lambda: _linear(2))
@torch.no_grad()
def no_grad_forward(m: Any, x: Tensor) -> Tensor:
    """All of `forward` under the decorator."""
    return m.head(F.relu(m.linear(x)))


@net(shared=_linear, inner=_linear)
def grad_modes(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Regions of either grad mode, one inside the other, reading one weight in all of them."""
    y = m.shared(x)
    with torch.no_grad():
        z = F.relu(m.shared(y))
        with torch.enable_grad():
            inner = m.inner(z)
        z = m.shared(z) + inner
    return m.shared(z), inner


@net(before=_linear, cast=_linear, after=_linear)
def autocast(m: Any, x: Tensor) -> Tensor:
    """A linear layer that runs in bfloat16, between two that do not."""
    y = m.before(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.relu(m.cast(y))
    return m.after(y.float())


@net(shared=_linear, frozen=_linear, head=_linear)
def autocast_off(m: Any, x: Tensor) -> Tensor:
    """A float32 island in an autocast region, its weight used on both sides; under `no_grad`."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.shared(x)
        with torch.autocast("cpu", enabled=False):
            z = m.shared(y.float())
    with torch.no_grad():
        z = m.frozen(z)
    return m.head(z)


@net(
    frozen=no_grad_method,
    plain=lambda: _linear(2),
    body=lambda: _linear(2),
    widen=lambda: nn.Linear(2, WIDTH),
)
def mixed_regions(m: Any, x: Tensor) -> Tensor:
    """`no_grad` in a submodule, then a branch that has such a submodule, then a loop."""
    y = m.widen(m.frozen(x))
    y = torch.cond(y.sum() > 0, m.frozen, m.plain, (y,))
    return while_loop(
        lambda count, _: count < STEPS,
        lambda count, y: (count + 1, m.body(m.widen(y))),
        (torch.zeros((), dtype=torch.int64), y),
    )[1]


_TAGS = {"control_flow", "linear"}


def _model(name: str, make: Callable[[], nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, floats(4, WIDTH), tags={*_TAGS, *tags})


MODELS: tuple[ZooModel, ...] = (
    zoo_model("cond_conv", conv_branches, floats(2, 3, 6, 6), tags={"control_flow", "conv", "bn"}),
    _model("cond_nested", nested_branches),
    _model("cond_one_without_weights", branch_without_weights),
    _model("cond_shared_weight", branches_share_weight, "shared"),
    zoo_model("cond_weight_outside", branch_shares_outside, ids(WORDS, 4),
              tags=_TAGS | {"embedding", "tied", "shared"}),
    zoo_model("cond_two_outputs", branch_outputs, floats(4, WIDTH), floats(4, WIDTH),
              tags=_TAGS | {"multi_output", "shared"}),
    zoo_model("loop", loop, floats(4, WIDTH), ids(4), tags=_TAGS),
    _model("loop_two_values", loop_two_values, "multi_output"),
    _model("loop_of_branches", loop_of_branches, "shared"),
    zoo_model("scan_cell", scan_cell, floats(2, STEPS, WIDTH),
              tags=_TAGS | {"recurrent", "multi_output"}),
    zoo_model("scan_two_values", scan_two_values, floats(2, STEPS, WIDTH),
              tags=_TAGS | {"recurrent"}),
    zoo_model("map_rows", map_rows_net, floats(4, STEPS, WIDTH), floats(WIDTH),
              tags=_TAGS | {"shared"}, dynamic=False),
    _model("no_grad_method", no_grad_method),
    _model("no_grad_forward", no_grad_forward),
    _model("grad_modes", grad_modes, "shared", "multi_output"),
    _model("autocast", autocast),
    _model("autocast_off", autocast_off, "shared"),
    _model("mixed_regions", mixed_regions, "shared"),
)  # fmt: skip
