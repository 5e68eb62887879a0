# SPDX-License-Identifier: Apache-2.0
"""What ExecuTorch refuses: the error names the operators, their modules, and what to do."""

from __future__ import annotations

import pytest
import qompose
import torch
from torch import Tensor, nn

pytest.importorskip("executorch")


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bags(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        way = x.sum() > 0
        return self.head(torch.cond(way, lambda y: self.one(y), lambda y: self.two(y), (x,)))


class SharedWithABranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return torch.cond(x.sum() > 0, lambda y: self.one(y), lambda y: y * 2, (y,))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Conv1d(3, 4, 3, padding="same"), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(x).relu())


WORDS = torch.randint(10, (2, 3))
IMAGE, ROWS = (
    torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in ((1, 3, 9), (3, 4))
)
CASES = {
    "no operator": (Bags, [WORDS], r"no such operator as embedding_bag \(aten.embedding_bag in bags\)"),
    "in bodies": (
        Branches, [ROWS, -ROWS], r"operator as linear \(aten.linear in one\), linear \(aten.linear in two\)\."
    ),
    "a constant": (SharedWithABranch, [ROWS, -ROWS], r"because of \S+\. Lower"),
    "at load": (Padded, [IMAGE], r"cannot load .*not int8 kernels: aten.convolution.default in wide, "),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_says_what_and_where_and_the_remedy(name: str) -> None:
    make, batches, message = CASES[name]
    torch.manual_seed(0)
    exported = torch.export.export(make().eval().requires_grad_(False), (batches[0],))
    prepared = qompose.prepare_pt2e(exported, qompose.compose("xnnpack"))
    qompose.calibrate(prepared, [(batch,) for batch in batches])
    converted = qompose.convert_pt2e(prepared)
    with pytest.raises(qompose.TargetError, match=message) as caught:
        qompose.lower(converted, "executorch")
    assert "Lower the model for the target 'torch' instead" in str(caught.value)
    assert caught.value.__cause__ is not None
