# SPDX-License-Identifier: Apache-2.0
"""What the transforms of the ecosystem's quantizers change, place by place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose.quantizer.interop.process_state import fenced
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core.quantizer.interop.aligning import aligned, applied, check, run
from tests.ecosystem.catalogue import BY_NAME
from tests.ecosystem.models import Convolutional, Embedded, Encoder

# These packages warn when they are imported and when they run.
pytestmark = pytest.mark.filterwarnings("ignore")


class Scalars(nn.Module):
    """Numbers among the operands, a mask of -inf, dropout, and a reused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.linear(x)) * 0.5 + 2
        scores = torch.softmax(x @ x.transpose(-1, -2) / 2.0 + self.mask, -1)
        return self.linear(F.dropout(scores @ x, 0.1, self.training)) - 1.5


MODELS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "cnn": (Convolutional, torch.randn(4, 3, 8, 8)),
    "mlp": (Embedded, torch.randint(50, (8, 6))),
    "encoder": (Encoder, torch.randn(4, 5, 32)),
    "scalars": (Scalars, torch.randn(2, 8, 8)),
}

POOL, SDPA = ("adaptive_avg_pool2d",), ("scaled_dot_product_attention",)
EXPECTED: dict[tuple[str, str], list[tuple[str, ...]]] = {
    ("TOSA", "cnn"): [POOL],
    ("TOSA", "mlp"): [("embedding",)],
    ("TOSA", "encoder"): [("layer_norm",), SDPA, ("layer_norm_1",)],
    ("TOSA", "scalars"): [
        ("mul",),
        ("add",),
        ("matmul", "div"),
        ("add_1", "softmax"),
        ("matmul_1",),
        ("sub",),
    ],
    ("CortexM", "cnn"): [POOL],
    ("CortexM", "encoder"): [],
    ("CortexM", "scalars"): [("mul",), ("add",), ("matmul",), ("div",), ("matmul_1",), ("sub",)],
    ("XNNPACK", "encoder"): [],
    ("XNNPACK", "scalars"): [("mul",), ("add",)],
    ("Vulkan dynamic", "scalars"): [("mul",), ("add",)],
    ("QNN 8a8w", "encoder"): [SDPA],
    ("QNN 8a8w", "scalars"): [("silu",), ("mul",), ("add",), ("div",), ("sub",)],
    ("MediaTek", "encoder"): [SDPA],
}
"""The operators of each place that is changed."""


def exported(model: str) -> tuple[GraphModule, Tensor]:
    kind, x = MODELS[model]
    torch.manual_seed(0)
    program = torch.export.export(kind().eval(), (x,)).module(check_guards=False)
    assert isinstance(program, GraphModule)
    return program, x


def transform_of(name: str) -> Any:
    """Return a quantizer's transform, behind a fence."""

    def transform(own: GraphModule) -> GraphModule:
        with fenced():
            after = BY_NAME[name].make().transform_for_annotation(own)
        assert isinstance(after, GraphModule)
        return after

    return transform


@pytest.mark.parametrize(("quantizer", "model"), EXPECTED, ids=" on ".join)
def test_places(quantizer: str, model: str) -> None:
    program, x = exported(model)
    alignment = check(program, transform_of(quantizer), (x,))
    assert [change.nodes for change in alignment.changes] == EXPECTED[quantizer, model]
    assert not alignment.unproven


@pytest.mark.parametrize("model", [Encoder, Convolutional])
def test_symbolic_sizes(model: type[nn.Module]) -> None:
    """TOSA's passes write symbols into operators: what they return cannot be run, the places can."""
    x = MODELS["cnn" if model is Convolutional else "encoder"][1]
    batch = torch.export.Dim("batch", max=64)
    exported = torch.export.export(model().eval(), (x,), dynamic_shapes=({0: batch},))
    program = exported.module(check_guards=False)
    assert isinstance(program, GraphModule)
    alignment, before, _ = aligned(program, transform_of("TOSA"))
    assert alignment.changes and not alignment.unproven
    working = applied(program, alignment, alignment.changes)
    for count in (2, 7):
        inputs = (torch.randn(count, *x.shape[1:]),)
        torch.testing.assert_close(run(working, inputs), run(before, inputs), rtol=1e-4, atol=1e-5)
