# SPDX-License-Identifier: Apache-2.0
"""How far outputs are from those of the float network, over everything judged and by source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accuracy_tasks.subject import Figures, Source, Subject
from observers import sqnr
from torch import Tensor
from torch.utils import _pytree as pytree

WORST = 0.01
SQNR, COSINE, WORST_COSINE = "SQNR, dB", "cosine", "worst 1 %"


def outputs(run: Callable[..., Any], source: Source) -> Tensor:
    """What a model gives for all batches of a source.

    Raises:
        ValueError: some of it is no number.
    """
    with torch.no_grad():
        found = torch.cat([_tensor(run(*inputs)) for inputs in source.batches])
    if not found.isfinite().all():
        raise ValueError("outputs are not finite")
    return found


def _tensor(value: Any) -> Tensor:
    """The one tensor; runtimes return lists. A copy, since some write to it on their next call."""
    tensor: Tensor = pytree.tree_leaves(value)[0]
    return tensor.detach().clone()


def scores(
    subject: Subject, expected: dict[str, Tensor], found: dict[str, Tensor]
) -> dict[str, Any]:
    """The figures of everything that is judged, and those by source."""
    whole = _figures(
        subject, torch.cat([*expected.values()]), torch.cat([*found.values()]), subject.truth()
    )
    sources = {
        name: _figures(subject, expected[name], found[name], source.truth)
        for name, source in subject.judged.items()
    }
    return {"figures": whole, "by_source": sources}


def _figures(subject: Subject, expected: Tensor, found: Tensor, truth: Tensor | None) -> Figures:
    if found.shape != expected.shape:
        raise ValueError(
            f"outputs are {tuple(found.shape)}, those of float {tuple(expected.shape)}"
        )
    return {**_distance(subject, expected, found), **subject.figures(expected, found, truth)}


def _distance(subject: Subject, expected: Tensor, found: Tensor) -> Figures:
    if torch.equal(expected, found):
        return {}
    rows, others = subject.rows(expected).double(), subject.rows(found).double()
    cosines = torch.nn.functional.cosine_similarity(rows, others, dim=-1)
    worst = cosines.sort().values[: max(1, round(WORST * len(cosines)))]
    return {
        SQNR: sqnr([expected], [found]),
        COSINE: float(cosines.mean()),
        WORST_COSINE: float(worst.mean()),
    }
