# SPDX-License-Identifier: Apache-2.0
"""The configurations of XNNPACK: what they ask for, what excludes what, and how they mix."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import ConfigError
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn

from tests.core.toy import Model, sqnr
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import converted

CONFIG = get_symmetric_quantization_config


class TestNames:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({}, "static per-tensor"),
            ({"is_per_channel": True}, "static per-channel"),
            ({"is_per_channel": True, "is_dynamic": True}, "dynamic per-channel"),
            ({"is_dynamic": True, "group_size": 64}, "dynamic int4 groups of 64"),
            ({"weight_only": True}, "weight-only per-tensor"),
            ({"weight_only": True, "group_size": 32}, "weight-only int4 groups of 32"),
            (
                {"is_per_channel": True, "weight_qmin": -8, "weight_qmax": 7},
                "static int4 per-channel",
            ),
            ({"range": "minmax", "balance": False},
             "static per-tensor, range minmax, balance False"),
            ({"is_per_channel": True, "weight_range": "mse"}, "static per-channel, weight range mse"),
            ({"algorithms": ("equalization", "smooth_quant")},
             "static per-tensor, algorithms equalization and smooth_quant"),
            ({"act_qmin": -127}, "static per-tensor, activations [-127, 127]"),
            ({"weight_qmin": -63, "weight_qmax": 63}, "static per-tensor, weights [-63, 63]"),
        ],
    )  # fmt: skip
    def test_say_what_was_asked(self, options: dict[str, Any], name: str) -> None:
        assert str(CONFIG(**options)) == name

    def test_those_of_the_backend_are_made_by_the_function(self) -> None:
        configs = qompose.backend.load_backend("xnnpack").configs
        assert configs["dynamic per-channel"] == CONFIG(True, is_dynamic=True)

    @pytest.mark.parametrize("word", ["minmax", "mse", "histogram"])
    def test_the_range_of_weights(self, word: str) -> None:
        """With one scale per channel, static, dynamic or alone, and per tensor; and all of it is data."""
        for options in (
            {"is_per_channel": True}, {"is_per_channel": True, "is_dynamic": True},
            {"is_per_channel": True, "weight_only": True}, {},
        ):  # fmt: skip
            config = CONFIG(**options, weight_range=word)
            assert isinstance(config.weight, qompose.QuantizationSpec)
            maker = qompose.observers.weight_observer_for_range(word, per_channel=bool(options))
            assert config.weight.observer_or_fake_quant_ctr == maker

    def test_positions_are_those_of_executorch(self) -> None:
        assert CONFIG(True, False, True, -128, 127, -127, 127) == CONFIG(True, is_dynamic=True)


class TestWhatExcludesWhat:
    @pytest.mark.parametrize(
        ("named", "options"),
        [
            ("fake_quantize", {"fake_quantize": "learned"}),
            ("learnd", {"is_qat": True, "fake_quantize": "learnd"}),
            ("weight_only", {"weight_only": True, "is_dynamic": True}),
            ("is_dynamic=True", {"group_size": 32}), ("48", {"group_size": 48, "is_dynamic": True}),
            ("group_size .*'32'", {"group_size": "32", "is_dynamic": True}),
            (r"group_size .*32\.0", {"group_size": 32.0, "is_dynamic": True}),
            (r"act_qmin .*-128\.0", {"act_qmin": -128.0}),
            ("is_per_channel .*'no'", {"is_per_channel": "no"}), ("balance .*0", {"balance": 0}),
            ("'smoothquant'.*'smooth_quant'", {"algorithms": ("smoothquant",)}),
            ("algorithms", {"algorithms": 1}),
            ("awq", {"algorithms": ("awq",), "is_dynamic": True}),
            ("equalization", {"algorithms": ("equalization",), "is_qat": True}),
            ("per_token=False", {"per_token": False}),
            ("is_dynamic=True", {"per_token": False, "weight_only": True}),
            ("weight_range .*'widest'", {"weight_range": "widest"}),
            ("got 'mse'", {"weight_range": "mse", "is_dynamic": True, "group_size": 32}),
            ("act_qmin=-127", {"weight_only": True, "act_qmin": -127}),
            ("symmetric=False", {"weight_only": True, "group_size": 32, "symmetric": False}),
            ("symmetric", {"weight_only": True, "symmetric": 1}),
            (
                r"scale_dtype=torch\.float32",
                {"weight_only": True, "group_size": 32, "scale_dtype": torch.float32},
            ),
            ("group_size", {"weight_only": True, "scale_dtype": torch.bfloat16}),
            ("act_qmax=63, range='mse'", {"weight_only": True, "act_qmax": 63, "range": "mse"}),
        ],
    )  # fmt: skip
    def test_when_it_is_made(self, named: str, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=named):
            CONFIG(**options)

    @pytest.mark.parametrize(
        ("options", "found"),
        [
            ({"act_qmin": -64, "act_qmax": 63}, r"\[-64, 63\]"),
            ({"is_dynamic": True}, "per_tensor_symmetric"),
            ({"is_dynamic": True, "group_size": 32, "weight_qmin": -7}, "-7"),
            ({"weight_qmin": -128}, "-128"),
        ],
    )
    def test_when_it_is_set(self, options: dict[str, Any], found: str) -> None:
        with pytest.raises(ConfigError, match=found):
            XNNPACKQuantizer().set_global(CONFIG(**options))


def forward(m: Any, x: Tensor) -> Tensor:
    x = m.tokens(m.conv(x).flatten(2).transpose(1, 2))
    x = x + m.narrow(nn.functional.gelu(m.wide(x)))
    return m.head(x)


@pytest.fixture(scope="module")
def mixed() -> tuple[nn.Module, torch.fx.GraphModule, Tensor]:
    torch.manual_seed(0)
    sizes = {"tokens": (8, 64), "wide": (64, 96), "narrow": (96, 64), "head": (64, 5)}
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6())
    linears = {name: nn.Linear(*size) for name, size in sizes.items()}
    model, x = Model(forward, conv=conv, **linears), torch.randn(2, 3, 8, 8)
    quantizer = (
        XNNPACKQuantizer()
        .set_global(CONFIG(True))
        .set_module_name("wide", CONFIG(True, is_dynamic=True))
        .set_module_name("narrow", CONFIG(is_dynamic=True, group_size=32))
        .set_module_name("head", CONFIG(True, weight_only=True))
    )
    more = [torch.randn(2, 3, 8, 8) for _ in range(4)]
    return model, converted(model, x, *more, quantizer=quantizer), x


RULES = {
    "tokens": "linear", "wide": "linear_dynamic", "narrow": "linear_dynamic_groups",
    "head": "linear_weight_only", "conv.0": "conv2d_hardtanh",
}  # fmt: skip


class TestMixed:
    @pytest.mark.parametrize(
        "target", ["torch", pytest.param("executorch", marks=pytest.mark.full)]
    )
    def test_each_module_has_its_kernel(self, mixed: Any, target: str) -> None:
        if target == "executorch":
            pytest.importorskip("executorch")
        model, quantized, x = mixed
        lowered = qompose.lower(quantized, target=target)
        report = qompose.report(lowered)
        rows = [row for row in report.rows if row.macs]
        assert {row.module: row.rule for row in rows} == RULES
        if target == "executorch":
            (gelu,) = (row for row in report.rows if row.operator == "aten.gelu")
            assert gelu.state == "float" and "delegate" in gelu.explanation
            assert lowered.delegation.whole
        assert Counter(row.state for row in rows) == {
            "int8 kernel": 4, "float kernel on integers": 1
        }  # fmt: skip
        y = lowered(x) if target == "torch" else lowered.run(x)
        assert sqnr(quantized(x), y) > 40
        assert sqnr(model(x), y) > 15

    def test_of_open_sizes_several_are_read_when_the_program_runs(self) -> None:
        pytest.importorskip("executorch")
        quantizer = XNNPACKQuantizer().set_global(CONFIG(True, weight_only=True))
        sizes = ({0: torch.export.Dim("rows", max=8), 1: torch.export.Dim("tokens", max=8)},)
        exported = torch.export.export(
            nn.Linear(64, 8), (torch.randn(2, 5, 64),), dynamic_shapes=sizes
        )
        quantized = qompose.convert_pt2e(qompose.prepare_pt2e(exported, quantizer))
        program = qompose.lower(quantized, target="executorch")
        x = torch.randn(3, 4, 64)
        assert sqnr(quantized(x), program.run(x)) > 40

    @pytest.mark.parametrize(
        ("rows", "states"),
        at_once([(1, ["int8 kernel"]), (5, ["simulated (Q/DQ)"])], (5, ["simulated (Q/DQ)"])),
    )
    def test_one_scale_for_all_rows_is_not_what_the_runtime_does(
        self, rows: int, states: list[str]
    ) -> None:
        """So it is computed as the graph says, and not as XNNPACK would: a scale for each row."""
        pytest.importorskip("executorch")
        x = torch.randn(rows, 64) * torch.logspace(0, 2, rows)[:, None]
        config = CONFIG(True, is_dynamic=True, per_token=False)
        quantizer = XNNPACKQuantizer().set_global(config)
        quantized = converted(nn.Linear(64, 8), x, quantizer=quantizer)
        assert sqnr(quantized(x), qompose.lower(quantized)(x)) > 100
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qompose.QomposeWarning)
            program = qompose.lower(quantized, target="executorch")
        assert [row.state for row in qompose.report(program).rows] == states
        assert sqnr(quantized(x), program.run(x)) > 100


@pytest.mark.parametrize(("sides", "rule"), [((2, 0), "pad_conv1d"), ((2, -1), "conv1d")])
def test_zeros_on_one_side_are_part_of_a_convolution(sides: tuple[int, int], rule: str) -> None:
    model = Model(lambda m, x: m.conv(nn.functional.pad(x, sides)), conv=nn.Conv1d(3, 4, 3))
    quantized = converted(
        model, torch.randn(2, 3, 8), quantizer=XNNPACKQuantizer().set_global(CONFIG())
    )
    assert [row.rule for row in qompose.report(quantized).rows if row.macs] == [rule]
