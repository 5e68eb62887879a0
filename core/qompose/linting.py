# SPDX-License-Identifier: Apache-2.0
"""What looks wrong after calibration, before anything is converted: by tensor, module and who wants it.

What is looked at are the statistics themselves, and the parameters of foreign observers not at all, so a
look costs nothing beside a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from torch import nn
from torch.fx import GraphModule

from qompose.collecting import prepared_record, watched
from qompose.guarding import guard_of
from qompose.observers import Observer
from qompose.observing import screen_of, unbalanced
from qompose.screening import Screen
from qompose.soundness import FAR_FROM_TYPICAL


def lint(prepared: GraphModule) -> list[str]:
    """Return a line for each tensor whose statistics look wrong; none where all is well.

    Those are: tensors that no batch came to, with mask values, with a single value throughout, or whose
    largest magnitude is a thousand times the median one.

    Raises:
        StageError: the model was not prepared.
    """
    record = prepared_record(prepared, "lint")
    seen = [
        (observer, screen)
        for observer, _ in watched(prepared, record)
        if (screen := screen_of(observer))
    ]
    known = [size for _, screen in seen if (size := _magnitude(screen)) > 0]
    typical = median(known) if known else 0.0
    return [
        f"{_subject(observer)} {problem}"
        for observer, screen in seen
        for problem in _problems(observer, screen, typical)
    ]


def _problems(observer: nn.Module, screen: Screen, typical: float) -> Iterator[str]:
    size = _magnitude(screen)
    if not screen.values:
        yield "never saw data: no batch came there"
    elif screen.mask is not None:
        yield f"holds {screen.mask}; it stays in float"
    elif (value := _only_value(observer)) is not None:
        yield f"was {value:g} throughout"
    elif size > FAR_FROM_TYPICAL * typical:
        yield f"reaches {size:g}, and the median of all tensors is {typical:g}: an outlier or a mask?"


def _magnitude(screen: Screen) -> float:
    """Return the largest magnitude that was seen, as far as a screen knows it."""
    return max(screen.bulk, -screen.far if screen.far > -math.inf else 0.0)


def _only_value(observer: nn.Module) -> float | None:
    inner = unbalanced(observer)
    if not isinstance(inner, Observer):
        return None
    facts = inner.facts()
    several = facts.values > 1 and facts.minimum is not None and facts.minimum == facts.maximum
    return facts.minimum if several else None


def _subject(observer: nn.Module) -> str:
    inner = unbalanced(observer)
    guard = guard_of(inner)
    return (
        guard.subject if guard is not None else str(getattr(inner, "subject", type(inner).__name__))
    )
