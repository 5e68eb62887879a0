# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is: the steps at which stages ask it, and what it may change at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch.fx import GraphModule, Node

from qompose.algorithms.calibrated import Calibrated
from qompose.observers.channel_ranges import Balance
from qompose.plan.plan import Group, Rewrite
from qompose.spec.claim import Claim


@dataclass(frozen=True)
class Rewritten:
    """What an algorithm did to a program before it is observed.

    Attributes:
        made: a rewrite for each change.
        refused: a line for each that was asked for and is not possible, with the reason.
    """

    made: tuple[Rewrite, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Watched:
    """Which tensors an algorithm wants the ranges of channels of, and some rows.

    Attributes:
        groups: by number of the group, what may be done to its channels.
        refused: a line for each tensor that was asked for and cannot be changed, with the reason.
    """

    groups: Mapping[int, Balance] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


class Algorithm:
    """Something that changes a program for the accuracy of its integers.

    Stages call every method of each algorithm of the table, in its order, and know none by name. What an
    algorithm has no use for it leaves out: each method does nothing by itself.

    Attributes:
        word: by which configurations ask for it, in `Claim.repairs`; "" of one that none asks for so.
    """

    word: ClassVar[str] = ""

    def rewrite(self, model: GraphModule, claims: Sequence[Claim]) -> Rewritten:
        """Change the parameters of a program, in place, once it is known who claims what."""
        return Rewritten()

    def channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        """Return the groups whose channels are to be looked at one by one."""
        return Watched()

    def means(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, int]]:
        """Yield the values whose means are to be kept, each with the dimension of its channels."""
        yield from ()

    def scale(self, found: Calibrated, number: int) -> None:
        """Decide how a group is scaled. Its parameters, and those of later groups, are not known yet."""

    def correct(self, found: Calibrated) -> None:
        """Change parameters that stay in float, once all quantization parameters are known."""


def with_channels(
    algorithms: Iterable[Algorithm],
    model: GraphModule,
    claims: Sequence[Claim],
    groups: Sequence[Group],
) -> tuple[tuple[Group, ...], list[str]]:
    """Return groups with what algorithms want to know of their channels, and what they refused."""
    result, refused = tuple(groups), list[str]()
    for algorithm in algorithms:
        found = algorithm.channels(model, claims, result)
        result = tuple(
            replace(group, balance=found.groups.get(number, group.balance))
            for number, group in enumerate(result)
        )
        refused += found.refused
    return result, refused
