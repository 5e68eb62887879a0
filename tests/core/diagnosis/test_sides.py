# SPDX-License-Identifier: Apache-2.0
"""A program that is rewritten to be compared has the names that the prepared one has."""

from __future__ import annotations

import qompose
import torch
from qompose.program.rewrites import SCALAR_TO_TENSOR
from torch import Tensor, nn

from tests.core.toy import ADD, LINEAR, export, randn, seeded, toy


class Doubles(nn.Module):
    """A number in the body of a cond, of which a rewriting makes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            return self.linear(x) + 2

        def no(x: Tensor) -> Tensor:
            return self.linear(x)

        return torch.cond(x.sum() > 0, yes, no, (x,))


def test_a_number_in_a_body_is_paired() -> None:
    batches = [randn(8, 4, seed=n) for n in range(4)]
    program = export(seeded(Doubles()), batches[0])
    prepared = qompose.calibrate(
        qompose.prepare_pt2e(program, toy(LINEAR, ADD, rewrites=(SCALAR_TO_TENSOR,))), batches
    )
    found = qompose.compare(program, qompose.convert_pt2e(prepared), batches)
    assert not found.unpaired
