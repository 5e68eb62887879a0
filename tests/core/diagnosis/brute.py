# SPDX-License-Identifier: Apache-2.0
"""What sensitivity and tuning find, found the long way."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import qompose
import torch
from qompose.conversion import qparams_solver
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tests.core.toy import plan_of, prepare


def alone(prepared: GraphModule, claims: Iterable[int]) -> GraphModule:
    """The converted model in which some claims are followed, and all others are dropped."""
    kept = set(claims)

    class Only(qparams_solver.QParamsSolver):
        def __init__(
            self, model: GraphModule, plan: qompose.plan.Plan, unlearned: bool = False
        ) -> None:
            super().__init__(model, plan, unlearned)
            others = set(range(len(plan.claims))) - kept
            self.dropped.update(dict.fromkeys(others, "switched off"))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        patch.setattr(qparams_solver, "QParamsSolver", Only)
        return qompose.convert_pt2e(prepared)


def stages(program: Any, quantizer: Any, batches: Any) -> dict[str, Any]:
    """All forms of a program, some regions of which may have no kernel."""
    prepared = qompose.calibrate(prepare(program, quantizer), batches)
    converted = qompose.convert_pt2e(prepared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        lowered = qompose.lower(converted)
    return {"float": program, "prepared": prepared, "converted": converted, "lowered": lowered}


def cost(model: Any, reference: Any, batches: Iterable[tuple[Tensor, ...]]) -> float:
    """The power of the error over that of the reference's outputs, a mean over the outputs."""
    noise: dict[int, float] = {}
    signal: dict[int, float] = {}
    for batch in batches:
        with torch.no_grad():
            pairs = zip(
                pytree.tree_leaves(model(*batch)),
                pytree.tree_leaves(reference(*batch)),
                strict=True,
            )
        for number, (one, other) in enumerate(pairs):
            error = (one.double() - other.double()).square().sum()
            noise[number] = noise.get(number, 0.0) + float(error)
            signal[number] = signal.get(number, 0.0) + float(other.double().square().sum())
    return sum(noise[n] / signal[n] for n in noise) / len(noise)


def expected_costs(
    prepared: GraphModule, batches: list[tuple[Tensor, ...]]
) -> dict[tuple[str, ...], float]:
    """By operators of each claim, what its quantization alone costs."""
    plan, found = plan_of(prepared), {}
    for number in range(len(plan.claims)):
        names = tuple(o.name for o in plan.operators if o.claim == number)
        found[names] = cost(alone(prepared, [number]), prepared, batches)
    return found


def observed_costs(ranking: qompose.diagnosis.Sensitivity) -> dict[tuple[str, ...], float]:
    return {row.operators: row.cost for row in ranking}
