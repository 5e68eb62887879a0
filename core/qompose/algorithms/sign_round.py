# SPDX-License-Identifier: Apache-2.0
"""SignRound: the weights of a block rounded so that the outputs of the whole block stay as they are.

Each value of a weight has an offset `V` from -1/2 to 1/2, which is added before it is rounded. Each scale, if
that is asked for, has a part `a` of its range: `q = clamp(round(w / (a s) + z + V))`. They are trained by
gradient descent that takes only the sign of the gradient, with steps that fall linearly to 0 (Cheng et al.,
"Optimize Weight Rounding via Signed Gradient Descent", 2023). Gradients pass through rounding as if it were
not there. The loss is the squared error of the block's outputs, each over its power.

Here `w / s + z` is where GPTQ comes to round each value, product by product, if that is better than the value
itself: signs of gradients find no integers that make up for one another where inputs correlate. Steps are
smaller than in the paper, so that what GPTQ has found is not lost.

A quarter of the different examples is held back. What has the least loss there is made: the nearest integers
if nothing is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qompose.algorithms.blocks import Block
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.gptq import compensated
from qompose.algorithms.interface import Algorithm, NotChanged, Part
from qompose.algorithms.product_inputs import times_smaller
from qompose.algorithms.products import (
    Operands,
    check_own_integers,
    check_own_scales,
    noted,
    scales_as_stored,
    set_integers,
    set_scales,
    weight_group,
    weight_of,
)
from qompose.errors import ConfigError, is_kind, kind_faults
from qompose.observers.auto_range import FEWEST_EXAMPLES, in_unit, unit_of
from qompose.spec.algorithm_choice import GPTQ, GPTQ_SEQUENTIAL as SEQUENTIAL, SIGN_ROUND as WORD
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams, for_each_value

_RATE = 0.3
"""The first step; an offset whose gradient keeps its sign moves half as far in total."""
_RATE_OF_RANGES, _PARTS = 0.05, (0.5, 1.2)
"""How much slower ranges move, and how small and large a part of what they were they may become."""
_HELD_BACK = 4
"""One in so many examples is held back."""
_LOOKS = 10
"""How often the loss of examples that are held back is measured on the way."""
_NEEDED = 1.02
"""How many times smaller that loss has to become."""


@dataclass(frozen=True)
class SignRound(Algorithm):
    """Trains how the weights of blocks are rounded, for claims that ask for it.

    Args:
        iterations: steps for each block, of a batch each.
        ranges: whether scales are trained, too, those of groups and channels on which nothing else depends.

    Raises:
        ConfigError: `iterations` is not a positive integer, or `ranges` no bool.
    """

    word: ClassVar[str] = WORD
    iterations: int = 200
    ranges: bool = False

    def __post_init__(self) -> None:
        if not is_kind(self.iterations, int) or self.iterations < 1:
            raise ConfigError(
                f"SignRound option iterations must be a positive integer, got {self.iterations!r}"
            )
        for fault in kind_faults(self, {"ranges": bool}):
            raise ConfigError(f"SignRound option {fault}")

    def learns(self, claim: Claim) -> Part | None:
        return "block"

    def learn(self, found: Calibrated, block: Block) -> None:
        weights = list[_Weight]()
        for product in block.products:
            with noted(found, self, product):
                weights.append(_Weight.of(found, product, ranges=self.ranges))
        if not weights:
            return
        outcome: str | NotChanged
        try:
            outcome = self._trained(found, block, weights)
        except NotChanged as reason:
            outcome = reason
        for weight in weights:
            with noted(found, self, weight.product) as effects:
                if isinstance(outcome, NotChanged):
                    raise outcome
                effects.append(outcome)

    def _trained(self, found: Calibrated, block: Block, weights: Sequence[_Weight]) -> str:
        """Decide on the weights of a block, and say what that gains.

        Raises:
            NotChanged: those next to their values stay.
        """
        data = _Data.of(block)
        best = before = data.loss(weights)
        kept, at = None, 0
        self._begin(found, block, weights)
        if (loss := data.loss(weights)) < best:
            best, kept = loss, [weight.state() for weight in weights]
        begun = best
        looks = {self.iterations * look // _LOOKS for look in range(1, _LOOKS + 1)}
        for step in range(self.iterations):
            rate = _RATE * (1 - step / self.iterations) / self.iterations
            gradients = data.gradients(step, weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.move(gradient, rate)
            if step + 1 in looks:
                loss = data.loss(weights)
                if loss < best:
                    best, at = loss, step + 1
                    kept = [weight.state() for weight in weights]
        gain = times_smaller(before, best)
        if kept is None or gain < _NEEDED:
            raise NotChanged(
                f"the squared error of block {block.name} on held-out calibration data is reduced by "
                f"only {gain:.4f}x; at least {_NEEDED}x is required"
            )
        for weight, state in zip(weights, kept, strict=True):
            weight.decide(found, state)
        return (
            f"squared error of block {block.name} on held-out calibration data reduced {gain:.2f}x: "
            f"{before:.3g} before, {begun:.3g} after GPTQ, {best:.3g} after {at} of "
            f"{self.iterations} iterations"
        )

    def _begin(self, found: Calibrated, block: Block, weights: Sequence[_Weight]) -> None:
        """Let weights begin where GPTQ rounds them, one after another."""
        decided = dict[str, Tensor]()
        for weight in weights:
            inputs = block.read_by(weight.product, decided)
            weight.positions = compensated(found, weight.product, inputs, weight.positions)
            decided |= _values([weight], [weight.state()])


State = tuple[Tensor, Tensor]


@dataclass
class _Weight:
    """A weight whose rounding is trained.

    Attributes:
        positions: where its values are, in steps.
        offsets: what is added before rounding, in its shape.
        parts: of each range, in the shape of the scales.
    """

    product: Operands
    positions: Tensor
    q: QParams
    offsets: Tensor
    parts: Tensor
    ranges: bool
    stored: torch.dtype | None

    @classmethod
    def of(cls, found: Calibrated, product: Operands, *, ranges: bool) -> _Weight:
        """Return a weight that would be rounded to nearest.

        Raises:
            NotChanged: its integers cannot be chosen.
        """
        number, q = weight_group(found, product)
        check_own_integers(found, product, shared=True)
        _check_alone(found, number, product)
        if q.zero_point.is_floating_point():
            raise NotChanged(f"the zero points of {product.weight.target} are not integers")
        try:
            check_own_scales(found, number)
        except NotChanged:
            ranges = False
        values = weight_of(found, product).float()
        step, zero_point = for_each_value(q, tuple(values.shape))
        return cls(
            product,
            values / step + zero_point,
            q,
            torch.zeros_like(values),
            torch.ones_like(q.scale.float()),
            ranges,
            scales_as_stored(found, number),
        )

    def state(self) -> State:
        """Return a copy of what is trained."""
        return self.offsets.clone(), self.parts.clone()

    def rounded(self, offsets: Tensor, parts: Tensor) -> tuple[QParams, Tensor, Tensor]:
        """Return parameters, integers as floats and the values they stand for; gradients pass through."""
        scale = self.q.scale.float() * parts
        if self.stored is not None:
            scale = scale + (scale.to(self.stored).float() - scale).detach()
        q = replace(self.q, scale=scale)
        step, zero_point = for_each_value(q, tuple(self.positions.shape))
        own, _ = for_each_value(self.q, tuple(self.positions.shape))
        exact = (self.positions - zero_point) * (own / step) + zero_point + offsets
        integers = (exact + (exact.round() - exact).detach()).clamp(q.low, q.high)
        return q, integers, (integers - zero_point) * step

    def move(self, gradients: tuple[Tensor, Tensor], rate: float) -> None:
        """Make a step against the signs of gradients."""
        of_offsets, of_parts = gradients
        self.offsets = (self.offsets - rate * of_offsets.sign()).clamp_(-0.5, 0.5)
        if self.ranges:
            moved = self.parts - _RATE_OF_RANGES * rate * of_parts.sign()
            self.parts = moved.clamp_(*_PARTS)

    def decide(self, found: Calibrated, state: State) -> None:
        """Give the weight what was trained."""
        q, integers, _ = self.rounded(*state)
        if self.ranges:
            set_scales(found, self.product, q.scale.to(self.q.scale), self.q.zero_point)
        set_integers(found, self.product, integers.to(self.q.dtype))


def _check_alone(found: Calibrated, number: int, product: Operands) -> None:
    """Check that no other operator reads the weight of a product: it is trained in one block.

    Raises:
        NotChanged: another does.
    """
    points = found.plan.groups[number].points
    others = {point.user or point.source for point in points} - {product.node.name}
    if others:
        raise NotChanged(
            f"{product.weight.target} is also used by {', '.join(sorted(others))}, and {WORD} trains a "
            f"weight for one layer; request {SEQUENTIAL} or {GPTQ} there"
        )


@dataclass(frozen=True)
class _Data:
    """A block's outputs in float, and which examples are held back.

    Attributes:
        wanted: the outputs of each batch of this process.
        held_back: which examples are, of each batch, `(N,)`.
        batches: all, in an order that their examples give: the process that has each, and its number there.
        order: in which batches are trained with: those that are not held back as a whole.
        units: by which values of each output are multiplied before they are squared.
        power: of each output, the sum of squares of all examples that are trained with.
    """

    block: Block
    wanted: list[tuple[Tensor, ...]]
    held_back: list[Tensor]
    batches: list[tuple[int, int]]
    order: list[tuple[int, int]]
    units: list[float]
    power: Tensor

    @classmethod
    def of(cls, block: Block) -> _Data:
        """Return the data of a block, of all processes.

        Raises:
            NotChanged: it has too few different examples, or its outputs are zero or not finite.
        """
        if not block.outputs:
            raise NotChanged(f"no operator outside block {block.name} reads its float outputs")
        wanted = [block.wanted(batch) for batch in range(block.batches)]
        own = [float(_largest(values)) for values in zip(*wanted, strict=True)]
        parts = block.exchange((own, [hashes.tolist() for hashes in block.hashes]))
        largest = torch.tensor([of_rank for of_rank, _ in parts if of_rank]).amax(0)
        if not bool(largest.isfinite().all()):
            raise NotChanged(f"the float outputs of block {block.name} have non-finite values")
        everywhere = [of_rank for _, of_rank in parts]
        different = sorted(
            {hash_ for of_rank in everywhere for of_batch in of_rank for hash_ in of_batch}
        )
        if len(different) < FEWEST_EXAMPLES:
            raise NotChanged(
                f"too few distinct examples in calibration, {len(different)}; at least {FEWEST_EXAMPLES} "
                "are required"
            )
        apart = torch.tensor(different[::_HELD_BACK])
        batches = sorted(
            (sorted(of_batch), rank, number)
            for rank, of_rank in enumerate(everywhere)
            for number, of_batch in enumerate(of_rank)
        )
        order = [one for one in batches if not set(different[::_HELD_BACK]).issuperset(one[0])]
        if not order:
            raise NotChanged("all distinct examples are held out")
        data = cls(
            block,
            wanted,
            [torch.isin(hashes, apart) for hashes in block.hashes],
            [(rank, number) for _, rank, number in batches],
            [(rank, number) for _, rank, number in order],
            [*map(unit_of, largest)],
            torch.ones(len(block.outputs), dtype=torch.float64),
        )
        power = data.summed(lambda batch: data.squares(batch, None, held_back=False))
        if not bool(power.isfinite().all() & (power > 0).all()):
            raise NotChanged(f"an output of block {block.name} is all zeros")
        return replace(data, power=power)

    def summed(self, of_batch: Callable[[int], Tensor]) -> Tensor:
        """Return the sum over all batches of all processes, which is the same however they are spread."""
        found = self.block.exchange(
            [of_batch(batch).double() for batch in range(self.block.batches)]
        )
        total = torch.stack([found[rank][number] for rank, number in self.batches])
        return total.sum(0)

    def squares(self, batch: int, found: Sequence[Tensor] | None, *, held_back: bool) -> Tensor:
        """Return sums of squares of what outputs are off by, `(outputs,)`, in their units.

        Without `found`, of themselves.
        """
        chosen = self.held_back[batch] if held_back else ~self.held_back[batch]
        wanted, sums = self.wanted[batch], []
        for at, exact in enumerate(wanted):
            off = exact.float() if found is None else found[at].float() - exact.float()
            off = in_unit(off, self.units[at])
            off = off if off.dim() > 1 else off.reshape(1, -1)
            if len(off) == len(chosen):
                off = off[chosen]
            sums.append(off.square().sum())
        return torch.stack(sums)

    def loss(self, weights: Sequence[_Weight]) -> float:
        """Return the squared error of the outputs of examples that are held back."""

        def of_batch(batch: int) -> Tensor:
            found = self.block.given(
                batch, _values(weights, [weight.state() for weight in weights])
            )
            return self.squares(batch, found, held_back=True)

        return float((self.summed(of_batch) / self.power).sum())

    def gradients(self, step: int, weights: Sequence[_Weight]) -> list[tuple[Tensor, Tensor]]:
        """Return the gradients of offsets and parts by the batch of a step, wherever that is.

        Raises:
            NotChanged: the loss is not finite.
        """
        rank, batch = self.order[step % len(self.order)]
        part = self._own_gradients(batch, weights) if rank == self.block.rank else None
        found: list[tuple[Tensor, Tensor]] | None = self.block.exchange(part)[rank]
        if found is None:
            raise NotChanged(f"the loss on the outputs of block {self.block.name} is not finite")
        return found

    def _own_gradients(
        self, batch: int, weights: Sequence[_Weight]
    ) -> list[tuple[Tensor, Tensor]] | None:
        states = [weight.state() for weight in weights]
        leaves = [tensor.requires_grad_() for state in states for tensor in state]
        with torch.enable_grad():
            found = self.block.given(batch, _values(weights, states))
            loss = (self.squares(batch, found, held_back=False) / self.power).sum()
            if not bool(loss.isfinite()):
                return None
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return list(zip(gradients[::2], gradients[1::2], strict=True))


def _largest(outputs: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of an output in all batches, NaN where there is one."""
    ends = [value.aminmax() for value in outputs if value.numel()]
    return torch.tensor([[-float(low), float(high)] for low, high in ends] or [0.0]).amax()


def _values(weights: Sequence[_Weight], states: Sequence[State]) -> dict[str, Tensor]:
    """Return the values of weights, by the products' names."""
    return {
        weight.product.node.name: weight.rounded(*state)[2]
        for weight, state in zip(weights, states, strict=True)
    }
