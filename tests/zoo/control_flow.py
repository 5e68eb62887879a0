# SPDX-License-Identifier: Apache-2.0
"""Models whose layers live in nested graphs: branches, loops, grad modes and autocast.

All export with `strict=True` too. Regions of `no_grad` are nested graphs only in programs that were
exported with gradients enabled.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, zoo_model

WIDTH = 6
WORDS = 20
STEPS = 3


def _linear(outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, outputs)


class ConvBranches(nn.Module):
    """Convolutions in both branches, in one of them under a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.narrow = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.mean() > 0, self.wide, self.narrow, (x,))
        return self.head(y.mean(dim=(2, 3)))


class NestedBranches(nn.Module):
    """A branch inside a branch, linear layers at every depth."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.high, self.low, self.no = (_linear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            y = self.first(x)
            return torch.cond(y.sum() > 0, self.high, self.low, (y,))

        return torch.cond(x.sum() > 0, yes, self.no, (x,))


class BranchWithoutWeights(nn.Module):
    """One branch has a linear layer, the other none and not even an operator on floats."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.linear, self.after = (_linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        y = torch.cond(y.amax() > 1.0, self.linear, lambda y: y.clone(), (y,))
        return self.after(y)


class BranchesShareWeight(nn.Module):
    """One linear layer in both branches, in one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            return self.linear(F.relu(self.linear(x)))

        def no(x: Tensor) -> Tensor:
            return self.linear(x) - 1.0

        return torch.cond(x.sum() > 0, yes, no, (x,))


class BranchSharesOutside(nn.Module):
    """A linear layer before the branch and in it; an embedding's table is a branch's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.linear = _linear()

    def forward(self, words: Tensor) -> Tensor:
        y = self.linear(self.embedding(words))

        def tied(y: Tensor) -> Tensor:
            return F.linear(self.linear(y), self.embedding.weight)

        def untied(y: Tensor) -> Tensor:
            return F.pad(y, (0, WORDS - WIDTH))

        return torch.cond(y.sum() > 0, tied, untied, (y,))


class BranchOutputs(nn.Module):
    """Branches of two operands, one closed over, and two outputs; a second branch reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = (_linear() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax()

        def yes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x) / scale, self.right(y)

        def no(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.right(x), x * y

        first, second = torch.cond(x.sum() > y.sum(), yes, no, (x, y))
        last = torch.cond(second.sum() > 0, self.last, torch.sin, (first,))
        return last, second


class Loop(nn.Module):
    """A linear layer applied once more often than an integer input says."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.body = _linear(), _linear()

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        def unfinished(count: Tensor, y: Tensor) -> Tensor:
            return count <= times

        def step(count: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.tanh(self.body(y))

        _, y = while_loop(unfinished, step, (torch.zeros_like(times), self.before(x)))
        return y


class LoopTwoValues(nn.Module):
    """Two values carried, each through a linear layer, until one is large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = _linear(), _linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def unfinished(count: Tensor, total: Tensor, y: Tensor) -> Tensor:
            return (count < 5) & (total.abs().amax() < 4.0)

        def step(count: Tensor, total: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = torch.sigmoid(self.gate(total)) * self.body(y)
            return count + 1, total + y, y

        start = torch.zeros((), dtype=torch.int64)
        _, total, y = while_loop(unfinished, step, (start, x.clone(), x.cos()))
        return total, y


class LoopOfBranches(nn.Module):
    """A branch in the body of a loop; one linear layer is used in it and after the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shared = _linear(), _linear()

    def forward(self, x: Tensor) -> Tensor:
        def unfinished(count: Tensor, y: Tensor) -> Tensor:
            return count < STEPS

        def step(count: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.cond(y.sum() > 0, self.shared, self.grow, (y,))

        start = torch.zeros((), dtype=torch.int64)
        _, y = while_loop(unfinished, step, (start, x.clone()))
        return self.shared(y)


class ScanCell(nn.Module):
    """An Elman cell over time: its state is carried, its outputs are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.state, self.head = _linear(), _linear(), _linear(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def cell(state: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.inputs(step) + self.state(state))
            return state, state.clone()

        last, states = scan(cell, torch.zeros_like(x[:, 0]), x, dim=1)
        return self.head(states), last


class ScanTwoValues(nn.Module):
    """An LSTM cell over time, carrying its two states."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.state = _linear(4 * WIDTH), _linear(4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def cell(carry: tuple[Tensor, Tensor], step: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            hidden, memory = carry
            gates = self.inputs(step) + self.state(hidden)
            let_in, forget, update, out = gates.chunk(4, dim=-1)
            memory = forget.sigmoid() * memory + let_in.sigmoid() * update.tanh()
            hidden = out.sigmoid() * memory.tanh()
            return (hidden, memory), hidden.clone()

        start = torch.zeros_like(x[:, 0])
        _, states = scan(cell, (start, start.clone()), x, dim=1)
        return states


class MapRows(nn.Module):
    """Two linear layers applied to every row of the batch by `map`, one of them after it too."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.shared = _linear(), _linear()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        def body(row: Tensor, scale: Tensor) -> Tensor:
            return F.relu(self.row(row)) * scale + self.shared(row)

        return self.shared(map_rows(body, x, scale))


class NoGradMethod(nn.Module):
    """A frozen encoder whose own `forward` is decorated, between layers that are not."""

    class Frozen(nn.Module):
        """Never trained."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _linear(), _linear()

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.relu(self.first(x)))

    def __init__(self) -> None:
        super().__init__()
        self.before, self.frozen, self.head = _linear(), self.Frozen(), _linear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.before(x)) + x)


class NoGradForward(nn.Module):
    """All of `forward` under the decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = _linear(), _linear(2)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.linear(x)))


class GradModes(nn.Module):
    """Regions of either grad mode, one inside the other, reading one weight in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.inner = _linear(), _linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.shared(x)
        with torch.no_grad():
            z = F.relu(self.shared(y))
            with torch.enable_grad():
                inner = self.inner(z)
            z = self.shared(z) + inner
        return self.shared(z), inner


class Autocast(nn.Module):
    """A linear layer that runs in bfloat16, between two that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.cast, self.after = (_linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.relu(self.cast(y))
        return self.after(y.float())


class AutocastOff(nn.Module):
    """A float32 island in an autocast region, its weight used on both sides; under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.frozen, self.head = (_linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.shared(x)
            with torch.autocast("cpu", enabled=False):
                z = self.shared(y.float())
        with torch.no_grad():
            z = self.frozen(z)
        return self.head(z)


class MixedRegions(nn.Module):
    """`no_grad` in a submodule, then a branch that has such a submodule, then a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.plain, self.body = NoGradMethod(), _linear(2), _linear(2)
        self.widen = nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(self.frozen(x))
        y = torch.cond(y.sum() > 0, self.frozen, self.plain, (y,))

        def step(count: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, self.body(self.widen(y))

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda count, _: count < STEPS, step, (start, y))[1]


_TAGS = {"control_flow", "linear"}


def _model(name: str, make: type[nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, floats(4, WIDTH), tags={*_TAGS, *tags})


MODELS: tuple[ZooModel, ...] = (
    zoo_model("cond_conv", ConvBranches, floats(2, 3, 6, 6), tags={"control_flow", "conv", "bn"}),
    _model("cond_nested", NestedBranches),
    _model("cond_one_without_weights", BranchWithoutWeights),
    _model("cond_shared_weight", BranchesShareWeight, "shared"),
    zoo_model("cond_weight_outside", BranchSharesOutside, ids(WORDS, 4),
              tags=_TAGS | {"embedding", "tied", "shared"}),
    zoo_model("cond_two_outputs", BranchOutputs, floats(4, WIDTH), floats(4, WIDTH),
              tags=_TAGS | {"multi_output", "shared"}),
    zoo_model("loop", Loop, floats(4, WIDTH), ids(4), tags=_TAGS),
    _model("loop_two_values", LoopTwoValues, "multi_output"),
    _model("loop_of_branches", LoopOfBranches, "shared"),
    zoo_model("scan_cell", ScanCell, floats(2, STEPS, WIDTH),
              tags=_TAGS | {"recurrent", "multi_output"}),
    zoo_model("scan_two_values", ScanTwoValues, floats(2, STEPS, WIDTH),
              tags=_TAGS | {"recurrent"}),
    zoo_model("map_rows", MapRows, floats(4, STEPS, WIDTH), floats(WIDTH),
              tags=_TAGS | {"shared"}, dynamic=False),
    _model("no_grad_method", NoGradMethod),
    _model("no_grad_forward", NoGradForward),
    _model("grad_modes", GradModes, "shared", "multi_output"),
    _model("autocast", Autocast),
    _model("autocast_off", AutocastOff, "shared"),
    _model("mixed_regions", MixedRegions, "shared"),
)  # fmt: skip
