# SPDX-License-Identifier: Apache-2.0
"""What observers have seen, set aside so that a calibration that fails leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch.fx import GraphModule

from qompose.guarding import guard_of
from qompose.observing import DerivedObserver, observer_nodes, observers_of
from qompose.repairs.means import mean_observers
from qompose.screening import Screen

State: TypeAlias = "tuple[Any, dict[str, Any], Screen | None]"


def states_of(model: GraphModule) -> list[State]:
    """Return a copy of all that the observers of a prepared model have seen; `restore` puts it back."""
    kept = []
    observers = [*observers_of(observer_nodes(model)).values()]
    observers += [observer for _, _, observer in mean_observers(model)]
    for observer in {id(o): o for o in observers}.values():
        if not isinstance(observer, DerivedObserver):  # which has seen nothing, and knows others
            guard = guard_of(observer)
            state = {k: copy.deepcopy(v) for k, v in vars(observer).items() if k != "forward"}
            kept.append((observer, state, None if guard is None else copy.deepcopy(guard.screen)))
    return kept


def restore(states: Iterable[State]) -> None:
    """Let observers be what they were."""
    for observer, state, screen in states:
        observer.__dict__.update(state)
        guard = guard_of(observer)
        if guard is not None and screen is not None:
            guard.screen = screen
