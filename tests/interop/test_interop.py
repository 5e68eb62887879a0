# SPDX-License-Identifier: Apache-2.0
"""Quantizers written for torchao and ExecuTorch, unmodified, as members of a composition."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import MemberError, TargetError
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both packages warn about themselves while they are imported
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class ConvBnRelu(nn.Module):
    """A folded convolution, a mean and a linear: what both quantizers want."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.relu, self.linear = nn.ReLU(), nn.Linear(8, 4)
        self.norm.running_mean.normal_(0, 0.1)
        self.norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(self.norm(self.conv(x))).mean((2, 3)))


def x86() -> Any:
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def xnnpack() -> Any:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


MEMBERS = {"torchao x86": x86, "executorch xnnpack": xnnpack}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return ConvBnRelu().eval()


@pytest.fixture
def inputs() -> tuple[Tensor]:
    return (torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)


def sqnr(reference: Tensor, other: Tensor) -> float:
    reference, other = reference.detach(), other.detach()
    return 20 * math.log10(float(reference.norm() / (reference - other).norm()))


def converted(model: nn.Module, inputs: tuple[Tensor], *members: Any) -> torch.fx.GraphModule:
    prepared = qompose.prepare_pt2e(torch.export.export(model, inputs), qompose.compose(*members))
    prepared(*inputs)
    return qompose.convert_pt2e(prepared)


@pytest.mark.parametrize("member", MEMBERS)
def test_alone_it_folds_the_batch_norm_and_quantizes(member: str, model, inputs) -> None:
    result = converted(model, inputs, MEMBERS[member]())
    rows = {row.operator: row for row in qompose.report(result).rows}
    for operator in ("aten.conv2d", "aten.batch_norm", "aten.linear"):
        assert rows[operator].state == "simulated (Q/DQ)", operator
    assert not any(node.target is torch.ops.aten.batch_norm.default for node in result.graph.nodes)
    assert sqnr(model(*inputs), result(*inputs)) > 30


@pytest.mark.parametrize("order", list(itertools.permutations(MEMBERS)), ids=" then ".join)
def test_the_first_member_wins_and_the_loss_is_listed(order, model, inputs) -> None:
    result = converted(model, inputs, *(MEMBERS[name]() for name in order))
    report = qompose.report(result)
    owners = {row.operator: row.owner for row in report.rows}
    first = qompose.compose(MEMBERS[order[0]]()).name
    assert owners["aten.conv2d"] == owners["aten.linear"] == first
    assert any("lost conv2d" in conflict for conflict in report.conflicts)
    assert sqnr(model(*inputs), result(*inputs)) > 30


def test_shared_specs_survive_the_loss_of_their_anchor(model, inputs) -> None:
    """The mean shares the scale of a relu that the first member took away."""
    report = qompose.report(converted(model, inputs, x86(), xnnpack()))
    mean = next(row for row in report.rows if row.operator == "aten.mean.dim")
    assert mean.owner == "executorch.XNNPACKQuantizer"
    assert mean.state == "simulated (Q/DQ)"


def test_a_member_is_left_as_it_was(model, inputs) -> None:
    quantizer = xnnpack()
    before = {key: repr(value) for key, value in vars(quantizer).items()}
    converted(model, inputs, quantizer)
    assert {key: repr(value) for key, value in vars(quantizer).items()} == before
    again = qompose.report(converted(model, inputs, quantizer))
    assert again.count("simulated (Q/DQ)") == 5


@pytest.mark.parametrize("ours", ["x86_inductor", "xnnpack"])
def test_mixed_with_our_own(ours: str, model, inputs) -> None:
    for members in ((ours, xnnpack()), (xnnpack(), ours)):
        result = converted(model, inputs, *members)
        assert sqnr(model(*inputs), result(*inputs)) > 30


def test_lowering_says_that_a_foreign_owner_brings_no_kernels(model, inputs) -> None:
    result = converted(model, inputs, xnnpack())
    with pytest.raises(TargetError, match=r"executorch\.XNNPACKQuantizer has kernels for none"):
        qompose.lower(result, "torch")


def test_what_is_no_quantizer_is_refused() -> None:
    with pytest.raises(qompose.UserError, match="no annotate and validate"):
        qompose.compose(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (ValueError("tr"), MemberError, "Broken: transform_for_annotation raised ValueError: tr"),
        (None, qompose.UserError, "Broken: transform_for_annotation returned None"),
    ],
)  # fmt: skip
def test_a_transform_that_fails_is_named(result, error, message, model, inputs) -> None:
    class Broken:
        def transform_for_annotation(self, model):
            if isinstance(result, Exception):
                raise result
            return result

        def annotate(self, model):
            return model

        def validate(self, model):
            return None

    with pytest.raises(error, match=message):
        qompose.prepare_pt2e(torch.export.export(model, inputs), qompose.compose(Broken()))
