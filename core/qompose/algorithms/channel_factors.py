# SPDX-License-Identifier: Apache-2.0
"""Factors of channels, as decided: what is divided by them, and which parameters take them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.observers.channel_ranges import OUTPUT
from qompose.observers.make_observer import make_observer
from qompose.plan.plan import Group, Plan
from qompose.program.graph import constant_of
from qompose.program.meta import FACTORS_TAG, tag, tag_of
from qompose.spec.claim import Claim
from qompose.spec.qdq import Absorbed, axis_of, in_rows
from qompose.spec.qparams import along

JUDGED = 256
"""How many outputs of products, at least, an error with factors is measured on; they are spread over all."""
_FOR_NOTHING, _FOR_A_PASS = 1.05, 1.25
"""How many times smaller an error has to become: where parameters do all of it, and where not."""
_STEPS_PER_OCTAVE = 4


def gain_needed(absorbers: object) -> float:
    """Return how many times smaller an error has to become for factors, with what takes them up if any."""
    return _FOR_NOTHING if absorbers else _FOR_A_PASS


def who_divides(absorbers: Sequence[str], nodes: Mapping[str, Node]) -> str:
    """Say what divides a tensor by its factors."""
    if not absorbers:
        return "by a multiplication in the graph"
    return f"by {' and '.join(str(nodes[name].target) for name in absorbers)}"


def in_steps(ratios: Tensor) -> Tensor:
    """Return positive ratios rounded to powers of `2 ** 0.25`."""
    return torch.exp2((torch.log2(ratios) * _STEPS_PER_OCTAVE).round() / _STEPS_PER_OCTAVE)


@dataclass(frozen=True)
class Factors:
    """What a side is divided by before quantization, shape `(C,)`, and the parameters it then has.

    Parameters that are chosen at run time are not those that it has here.
    `gain` is the error without factors over the one with them, both measured on rows held back.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor
    gain: float

    @property
    def effect(self) -> str:
        """Say what they gain."""
        return f"squared error on held-out calibration data reduced {self.gain:.1f}x"


@dataclass(frozen=True, eq=False)
class Absorbers:
    """Parameters in front of a tensor that take up the factors of its channels.

    Attributes:
        parameters: their names; each has the rows along its first dimension.
        rows: the row that each channel of the tensor comes from, `(C,)`; several may come from one.
        count: how many rows there are; those that no channel comes from stay as they are.
        held: by name of each value from theirs to the tensor, the rows of its elements, in a shape that
            broadcasts against it.
    """

    parameters: tuple[str, ...]
    rows: Tensor
    count: int
    held: Mapping[str, Tensor]

    def even(self, values: Tensor) -> Tensor:
        """Return the mean of numbers for channels, `(C,)`, over those that come from the same row."""
        sums = torch.zeros(self.count, dtype=values.dtype).index_add_(0, self.rows, values.cpu())
        counts = torch.zeros(self.count, dtype=values.dtype)
        counts.index_add_(0, self.rows, torch.ones_like(sums[self.rows]))
        return (sums / counts)[self.rows].to(values.device)

    def of_rows(self, values: Tensor) -> Tensor:
        """Return what rows are multiplied by, `(count,)`, if channels are divided by factors, `(C,)`."""
        vector = values.new_ones(self.count)
        vector[self.rows.to(values.device)] = 1 / values
        return vector


@dataclass(frozen=True, eq=False)
class Divided:
    """A float tensor that some operators read divided by factors of its channels.

    Attributes:
        values: the factors, `(C,)`.
        dim: the dimension of the channels.
        users: the operators that read it so, by name.
        absorbers: the parameters that make it so already; without any a product in the graph does.
    """

    values: Tensor
    dim: int
    users: tuple[str, ...]
    absorbers: Absorbers | None = None


@dataclass(frozen=True)
class ChannelFactors:
    """The factors that were decided on, and the parameters that are going to take them up.

    The model still holds those without them.

    Attributes:
        plan: the plan of the model.
        nodes: those of the prepared model, by name.
        factors: by group, what its channels are divided by before they are quantized.
        weights: by group of a weight that takes up factors, its name.
        taken_up: by name of a parameter, vectors and the dimensions along which they multiply it.
        divided: by name of a float tensor, what its readers divide it by.
        absorbers: by group with factors, the parameters far in front of it that divide its channels.
    """

    plan: Plan
    nodes: Mapping[str, Node]
    factors: dict[int, Factors] = field(default_factory=dict)
    absorbers: dict[int, Absorbers] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    taken_up: dict[str, list[tuple[Tensor, int]]] = field(default_factory=dict)
    divided: dict[str, Divided] = field(default_factory=dict)

    def absorbed(self, name: str) -> Absorbed:
        """Return the factors that a parameter is going to take up."""
        return self.taken_up.get(name, ())

    def constant(self, name: str) -> Tensor:
        """Return a parameter with its factors.

        It is computed anew each time, so that no second copy of all parameters is ever held.
        """
        constant, absorbed = parameter_of(self.nodes[name]), self.absorbed(name)
        if not absorbed:
            return constant.detach()
        return torch.cat([rows for _, _, rows in in_rows(constant, absorbed)])

    def beside_weights(self) -> dict[str, Tensor]:
        """Return all other parameters that take up factors, with those: biases, and what makes an input."""
        sides = [group.balance for group in self.plan.groups if group.balance is not None]
        names = [name for side in sides for name in (*side.biases, *side.absorbers)]
        found = [divided.absorbers for divided in self.divided.values()]
        found += self.absorbers.values()
        names += [name for absorbers in found if absorbers for name in absorbers.parameters]
        as_integers = {*self.weights.values()}
        changed = (n for n in names if n in self.taken_up and n not in as_integers)
        return {n: self.constant(n).to(parameter_of(self.nodes[n]).dtype) for n in changed}

    def qparams_of_rows(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Return scales and zero points of a weight that takes up factors: its observer saw it without them.

        Of any other group, None.
        """
        if (name := self.weights.get(number)) is None:
            return None
        found, group = [], self.plan.groups[number]
        whole: Any = make_observer(group.spec)
        constant, block = parameter_of(self.nodes[name]), getattr(group.spec, "block_size", None)
        in_parts = is_per_channel(group) or block is not None
        together = block[0] if block is not None and len(block) == constant.dim() else 1
        together = constant.shape[0] if together == -1 else together
        for _, _, rows in in_rows(constant, self.absorbed(name), multiple=together):
            observer: Any = make_observer(group.spec) if in_parts else whole
            observer(rows)
            found.append(observer.calculate_qparams())
        if not in_parts:
            return whole.calculate_qparams()  # type: ignore[no-any-return]
        scales, zero_points = zip(*found, strict=True)
        return torch.cat(scales), torch.cat(zero_points)


def commit_factors(found: ChannelFactors) -> None:
    """Tag every value of the model, in place, with the factors that it is held with from now on."""
    for name, absorbed in found.taken_up.items():
        _tag_factors(found.nodes[name], [(dim, vector) for vector, dim in absorbed])
    for number, factors in found.factors.items():
        group, balance = found.plan.groups[number], found.plan.groups[number].balance
        if balance is not None and (balance.side == OUTPUT or balance.absorbers):
            for name in _given_by(group.points[0].source, found.plan.claims):
                _tag_factors(found.nodes[name], [(balance.dim, 1 / factors.values)])
    for number, absorbers in found.absorbers.items():
        _tag_path(found.nodes, absorbers, found.factors[number].values)
    for divided in found.divided.values():
        if divided.absorbers is not None:
            _tag_path(found.nodes, divided.absorbers, divided.values)


def without_factors(node: Node, value: Tensor) -> Tensor:
    """Return a value of a node as it is where no parameters have taken up factors."""
    for dim, numbers in tag_of(node, FACTORS_TAG) or ():
        vector = torch.tensor(numbers, dtype=value.dtype, device=value.device)
        of_dim = isinstance(dim, int)
        value = value / (along(vector, dim, value.dim()) if of_dim else vector.view(dim))
    return value


def _given_by(source: str, claims: Iterable[Claim]) -> list[str]:
    """Return what gives a tensor: the operators of its claim, which come to it one by one."""
    names = (name for claim in claims if claim.output == source for name in claim.nodes)
    return [*names] or [source]


def parameter_of(node: Node) -> Tensor:
    """Return the parameter that a node reads."""
    constant = constant_of(node)
    assert constant is not None
    return constant


def is_per_channel(group: Group) -> bool:
    """Tell whether a weight has a scale for each of its output channels."""
    return axis_of(group.spec) == 0


def _tag_path(nodes: Mapping[str, Node], absorbers: Absorbers, values: Tensor) -> None:
    """Tag all values between the parameters that take up factors and what these are for."""
    of_rows = absorbers.of_rows(values.cpu())
    for name, rows in absorbers.held.items():
        before = tag_of(nodes[name], FACTORS_TAG) or []
        own = [list(rows.shape), of_rows[rows.flatten()].tolist()]
        tag(nodes[name], **{FACTORS_TAG: [*before, own]})


def _tag_factors(node: Node, factors: list[tuple[int, Tensor]]) -> None:
    tag(node, **{FACTORS_TAG: [[dim, vector.tolist()] for dim, vector in factors]})
