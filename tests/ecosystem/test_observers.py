# SPDX-License-Identifier: Apache-2.0
"""Observers of OpenVINO's and Qualcomm's own, under torchao's engine and under ours: bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.core.toy import Model, nodes_calling, observers_of, sqnr
from tests.ecosystem.makers import openvino, qnn
from tests.ecosystem.models import sample
from tests.interop.peers import assert_same, by_qompose, by_torchao

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",  # of what these packages and torchao call
    "ignore::DeprecationWarning",
    "ignore:Nothing was quantized:qompose.QomposeWarning",
)

WEIGHTS_ONLY = {
    "INT8WO_SYM": {}, "INT8WO_ASYM": {}, "INT4WO_SYM": {"group_size": 32}, "INT4WO_ASYM": {"group_size": 32},
}  # fmt: skip
LEAST = {"INT8": 38.0, "INT4": 15.0}
"""dB, by the first letters of a mode."""


def both(make: Callable[[], Any], program: Callable[[], Any], *batches: Any) -> Any:
    """Ours and theirs: the same outputs."""
    ours = by_qompose(program(), make(), *batches)
    theirs = by_torchao(_without_guards(program()), make(), *batches)
    assert_same(ours, theirs)
    assert (ours.quantizes, ours.dequantizes) == (theirs.quantizes, theirs.dequantizes)
    return ours


def _without_guards(program: Any) -> Any:
    """A program whose module is made without guards, which some transforms do not take."""
    module = program.module(check_guards=False)
    return type("Program", (), {"module": staticmethod(lambda: module)})


class TestOpenVINO:
    """Weights become bytes and a decompressing module, made by the observer itself."""

    @pytest.mark.parametrize(
        ("mode", "kind"),
        [
            pytest.param(mode, kind, marks=[] if kind == "mlp" else pytest.mark.full)
            for mode in WEIGHTS_ONLY
            for kind in ("cnn", "mlp", "encoder")
            if (mode[:4], kind) != ("INT4", "cnn")  # it has fewer channels than a group
        ],
    )
    def test_weights_only(self, mode: str, kind: str) -> None:
        this = sample(kind)
        make = lambda: openvino(mode, **WEIGHTS_ONLY[mode])  # noqa: E731
        ours = both(make, this.export, *this.batches)
        report = qompose.report(ours.model)
        products = [row for row in report.rows if row.macs and "scaled_dot" not in row.operator]
        assert {row.state for row in products} == {"simulated (Q/DQ)"}
        assert report.bytes_after < report.bytes_before / 2
        assert not [name for name in ours.model.state_dict() if name.endswith(".weight_q")]
        float_output = this.model(*this.batches[-1])
        assert sqnr(float_output, ours.outputs[0]) > LEAST[mode[:4]]

    @pytest.mark.parametrize("mode", ["INT8_SYM", "INT8_MIXED"])
    def test_a_bias_per_channel(self, mode: str) -> None:
        """It annotates that of a layer norm, on which torchao's engine fails."""
        this = sample("encoder")
        with pytest.raises(IndexError, match="Dimension out of range"):
            by_torchao(this.export(), openvino(mode), *this.batches)
        ours = by_qompose(this.export(), openvino(mode), *this.batches)
        assert ours.model.state_dict()["first_norm.bias_scale"].shape == (32,)
        assert sqnr(this.model(*this.batches[-1]), ours.outputs[0]) > 30

    def test_a_group_that_does_not_divide_the_channels(self) -> None:
        """It shows when NNCF converts; the message says where."""
        this = sample("mlp")
        prepared = qompose.prepare_pt2e(this.export(), openvino("INT4WO_SYM", group_size=48))
        prepared(*this.batches[0])
        names = set(prepared.state_dict())
        with pytest.raises(qompose.errors.MemberError) as caught:
            qompose.convert_pt2e(prepared)
        message = str(caught.value)
        assert "INT4WeightObserver.convert" in message
        assert "executorch.OpenVINOQuantizer" in message
        assert "InvalidGroupSizeError" in message
        assert set(prepared.state_dict()) == names

    def test_what_becomes_of_a_converted_model(self, tmp_path: Any) -> None:
        this = sample("mlp")
        x = this.batches[-1]
        ours = by_qompose(this.export(), openvino("INT8WO_ASYM"), *this.batches)
        assert torch.equal(copy.deepcopy(ours.model)(*x), ours.outputs[0])
        assert torch.equal(torch.export.export(ours.model, x).module()(*x), ours.outputs[0])
        assert all("FakeTensor" in type(n.meta["val"]).__name__ for n in observers_of(ours.model))
        with pytest.raises(
            qompose.errors.ArtefactError, match="call_module of asymmetric_weights_decomp"
        ):
            qompose.save(ours.model, tmp_path / "model.qompose")

    @pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
    def test_a_tied_table_beside_ours(self, first: bool) -> None:
        """The same integers are asked for; the other member's kernels read dequantize operators alone."""
        tied = Model(
            lambda m, ids: F.linear(m.tokens(ids), m.tokens.weight), tokens=nn.Embedding(32, 32)
        )
        model, ids = tied.eval(), torch.randint(32, (4, 6))
        members = [openvino("INT8WO_SYM"), "x86_inductor"]
        members = members if first else members[::-1]
        prepared = qompose.prepare_pt2e(
            torch.export.export(model, (ids,)), qompose.compose(*members)
        )
        prepared(ids)
        found = qompose.convert_pt2e(prepared)
        (linear,) = nodes_calling(found, "linear")
        assert linear in next(iter(nodes_calling(found, "dequantize_per_channel"))).users
        owners = {row.operator: row.owner for row in qompose.report(found).rows}
        assert owners["aten.embedding"] == "executorch.OpenVINOQuantizer"
        assert owners["aten.linear"] == "x86_inductor"
        assert sqnr(model(ids), found(ids)) > 30


def concatenated() -> nn.Module:
    """Branches of different ranges that meet; that of the last is known."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.b(x)
        return m.c(torch.cat([torch.relu(m.a(x)), torch.tanh(y) * 3, torch.sigmoid(y)], 1))

    return Model(forward, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3), c=nn.Conv2d(12, 4, 1))


class TestQualcomm:
    """Observers that look for one another, per-block parameters, and what is derived from them."""

    @pytest.mark.parametrize(
        "dtype",
        [
            "use_8a8w",
            *(pytest.param(d, marks=pytest.mark.full) for d in ("use_16a16w", "use_16a4w")),
        ],
    )
    @pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channels"])
    def test_a_concatenation(self, dtype: str, per_channel: bool) -> None:
        """One observer sets the ranges of those before it, which it finds by name in the graph."""
        options = {"is_conv_per_channel": per_channel}
        model, x = concatenated().eval(), torch.randn(2, 3, 8, 8)
        make = lambda: qnn(dtype, **options)  # noqa: E731
        ours = both(make, lambda: torch.export.export(model, (x,)), (x / 2,), (x,))
        (cat,) = nodes_calling(ours.model, "cat")
        relu, product, sigmoid = (source.args[1:3] for source in cat.args[0])
        (behind,) = {user.args[1:3] for user in cat.users}
        assert relu == product == behind
        assert sigmoid[0] in (1 / 256, 1 / 65536)

    @pytest.mark.parametrize(
        "kind", ["mlp", *(pytest.param(k, marks=pytest.mark.full) for k in ("cnn", "encoder"))]
    )
    @pytest.mark.parametrize(
        "options", [{}, {"is_conv_per_channel": True, "is_linear_per_channel": True}]
    )
    def test_models(self, kind: str, options: dict[str, bool]) -> None:
        this = sample(kind)
        ours = both(lambda: qnn(**options), this.export, *this.batches)
        assert sqnr(this.model(*this.batches[-1]), ours.outputs[0]) > 25

    def test_blocks(self) -> None:
        """The weights convert themselves, and biases are derived from their observers."""
        this = sample("mlp")

        def make() -> Any:
            quantizer = qnn("use_16a4w_block", is_linear_per_channel=True)
            quantizer.set_block_size_map({"linear": (1, 16), "linear_1": (1, 32)})
            return quantizer

        ours = both(make, this.export, *this.batches)
        affine = [n for n in ours.model.graph.nodes if "dequantize_affine" in str(n.target)]
        assert len(affine) == 2
        assert ours.calls("quantize_affine") == [], "what they make is stored"
        state = ours.model.state_dict()
        assert state["inner.weight_q"].dtype is torch.int8
        assert state["inner.bias_q"].dtype is torch.int32
        assert sqnr(this.model(*this.batches[-1]), ours.outputs[0]) > 12
