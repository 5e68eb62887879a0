# SPDX-License-Identifier: Apache-2.0
"""What ExecuTorch refuses: the error names the operators, their modules, and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import qompose
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from qompose_xnnpack.executorch_target.errors import lowering_error
from qompose_xnnpack.executorch_target.export import export
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.sampling import at_once

pytest.importorskip("executorch")

QD = torch.ops.quantized_decomposed


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


class Bytes(nn.Module):
    """Rounds to uint8, which XNNPACK's partitioner takes around float operators; the runtime does not."""

    def forward(self, x: Tensor) -> Tensor:
        for step in (torch.relu, torch.relu):
            q = QD.quantize_per_tensor.default(x, 0.02, 128, 0, 255, torch.uint8)
            x = step(QD.dequantize_per_tensor.default(q, 0.02, 128, 0, 255, torch.uint8))
        return x


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Bytes()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x


WORDS = torch.randint(10, (2, 3))
ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
CASES = {
    "no operator": (Bags, [WORDS], r"aten\.embedding_bag in bags"),
    "in bodies": (Branches, [ROWS, -ROWS], r"aten\.linear in one.*aten\.linear in two"),
    "a constant": (SharedWithABranch, [ROWS, -ROWS], "'torch'"),
}


def converted(model: nn.Module, batches: list[Tensor], sizes: Any = None) -> GraphModule:
    model = model.eval().requires_grad_(False)
    exported = torch.export.export(model, (batches[0],), dynamic_shapes=sizes)
    prepared = qompose.prepare_pt2e(exported, qompose.compose("xnnpack"))
    qompose.calibrate(prepared, [(batch,) for batch in batches])
    return qompose.convert_pt2e(prepared)


@pytest.mark.parametrize("name", at_once(CASES, "no operator"))
def test_a_refusal_says_what_and_where_and_the_remedy(name: str) -> None:
    make, batches, named = CASES[name]
    with pytest.raises(qompose.errors.TargetError, match=named) as caught:
        qompose.lower(converted(make(), batches), "executorch")
    assert "'torch'" in str(caught.value), "the remedy"
    assert caught.value.__cause__ is not None


class Line(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.conv = kind(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


SIZES = ({0: torch.export.Dim("batch", max=4), 2: torch.export.Dim("length", min=4, max=9)},)
SAID: dict[str, tuple[nn.Module, list[Tensor], Any, str, str]] = {
    "no operator": (
        Bags(), [WORDS], None, "Operator torch._ops.aten._embedding_bag_forward_only.default is not in",
        r"aten\.embedding_bag in bags",
    ),
    "in bodies": (
        Branches(), [ROWS, -ROWS], None, "Node aten_linear_default: schema = aten::linear() was not",
        r"aten\.linear in one.*aten\.linear in two",
    ),
    "a constant": (
        SharedWithABranch(), [ROWS, -ROWS], None, "constant data node (b_zero_point_4) is tagged",
        r"because of zero_point_4",
    ),
    **{
        f"two sizes, {kind.__name__}": (
            Line(kind), [torch.randn(2, 3, 8)], SIZES, "XNNPACK reshape only supports 1 dynamic dimension.",
            r"because of conv\w+ \(aten\.conv\w+ in conv",
        )
        for kind in (nn.Conv1d, nn.ConvTranspose1d)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_executorch_says_is_told_by_the_users_names(name: str) -> None:
    """Its messages as version 1.5.1 has them; that it says so is shown on whole lowerings."""
    model, batches, sizes, said, named = SAID[name]
    exported = export(converted(model, batches, sizes), (batches[0],), {}, sizes)
    error = str(lowering_error(RuntimeError(said), {"forward": exported}))
    assert re.search(named, error) and error.endswith(f"RuntimeError: {said}")
    several = lowering_error(RuntimeError(said), {"encode": exported, "decode": exported})
    assert all(f"of method {method!r}" in str(several) for method in ("encode", "decode"))


@pytest.mark.full
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_a_convolution_of_two_sizes_known_at_run_time(kind: type[nn.Module]) -> None:
    model = converted(Line(kind), [torch.randn(2, 3, 8)], SIZES)
    with pytest.raises(qompose.errors.TargetError, match=r"aten\.conv\w+ in conv"):
        qompose.lower(model, "executorch")


def test_a_sentence_that_breaks_off_is_left_out_and_others_are_not() -> None:
    for said, told in (
        ("Only 1. This may occur when ", "Only 1."),
        ("Only 1. Got 2", "Only 1. Got 2"),
        ("Only when ", "Only when"),
        ("First.\nSecond.\nThird when ", "First.\nSecond."),
        ("First.\nSecond\n", "First.\nSecond"),
    ):
        assert str(lowering_error(RuntimeError(said), {})).endswith(f"RuntimeError: {told}")


def test_what_the_runtime_refuses_names_the_operators_that_are_not_int8() -> None:
    graph = torch.export.export(Rounding(), (ROWS,)).module()
    with pytest.raises(qompose.errors.TargetError, match=r"aten\.relu\.default in inner"):
        lower_to_executorch(graph, (ROWS,))
