# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is: the steps at which stages ask it, and what it may change at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch.fx import GraphModule, Node

from qompose.algorithms.calibrated import Calibrated
from qompose.observers.channel_ranges import Balance
from qompose.observers.input_sums import Columns
from qompose.plan.plan import Group, Rewrite
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams


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
    """The tensors whose channel ranges, and some rows, an algorithm wants kept.

    Attributes:
        groups: by number of the group, what may be done to its channels.
        refused: a line for each tensor that was asked for and cannot be changed, with the reason.
    """

    groups: Mapping[int, Balance] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


class Algorithm:
    """Something that changes a program for the accuracy of its integers.

    Stages call the methods of each algorithm of the table, in its order, and know none by name. Override what
    you need: every method does nothing by default. In training only `watch_channels` is called, and what it
    wants is not kept.

    Attributes:
        word: by which configurations ask for it, in `Claim.repairs`; "" if they do not ask for it by word.
    """

    word: ClassVar[str] = ""

    def rewrite(self, model: GraphModule, claims: Sequence[Claim]) -> Rewritten:
        """Change the parameters of a program, in place, once it is known who claims what."""
        return Rewritten()

    def watch_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        """Return the groups whose channels are to be looked at one by one."""
        return Watched()

    def watch_means(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, int, bool]]:
        """Yield the values whose means are to be kept, with the dimension of their channels.

        And whether a configuration asks for that by word, so that statistics without them are an error.
        """
        yield from ()

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Columns, int]]:
        """Yield the values whose second moments are to be kept, of which columns, and how many there are."""
        yield from ()

    def choose_factors(self, found: Calibrated, number: int, balance: Balance) -> None:
        """Decide on the factors of a group whose channels it watches.

        Those of earlier groups are decided; no quantization parameters are known yet.
        """

    def choose_qparams(self, found: Calibrated, number: int, q: QParams) -> QParams | None:
        """Return other quantization parameters for a weight than its observer gives; None leaves it those.

        All factors are chosen.
        """
        return None

    def correct(self, found: Calibrated) -> None:
        """Change parameters that stay in float; all quantization parameters are known."""


def choose_factors(algorithms: Iterable[Algorithm], found: Calibrated, number: int) -> None:
    """Let the algorithm that watches a group's channels decide on their factors."""
    balance = found.plan.groups[number].balance
    for algorithm in algorithms:
        if balance is not None and algorithm.word == balance.repair:
            algorithm.choose_factors(found, number, balance)


def choose_qparams(
    algorithms: Iterable[Algorithm], found: Calibrated, number: int, q: QParams
) -> QParams:
    """Return the parameters of a group that the algorithms leave it, each with those of the one before."""
    for algorithm in algorithms:
        q = algorithm.choose_qparams(found, number, q) or q
    return q


def with_channels(
    algorithms: Iterable[Algorithm],
    model: GraphModule,
    claims: Sequence[Claim],
    groups: Sequence[Group],
) -> tuple[tuple[Group, ...], list[str]]:
    """Return groups with what algorithms want to know of their channels, and what they refused."""
    result, refused = tuple(groups), list[str]()
    for algorithm in algorithms:
        found = algorithm.watch_channels(model, claims, result)
        result = tuple(
            replace(group, balance=found.groups.get(number, group.balance))
            for number, group in enumerate(result)
        )
        refused += found.refused
    return result, refused
