# SPDX-License-Identifier: Apache-2.0
"""The configurations of the x86 backend: what they ask for, what excludes what, and how they mix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import ConfigError
from qompose_x86_inductor import (
    X86InductorQuantizer,
    configs,
    get_default_x86_inductor_quantization_config,
)
from qompose_x86_inductor.onednn import exactness
from torch import Tensor, nn

from tests.core.toy import Model, sqnr

CONFIG = get_default_x86_inductor_quantization_config
WEIGHT_ONLY: dict[str, Any] = {"weight_only": True}


@pytest.fixture
def with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "recommended_weight_range", lambda: exactness.FULL)


@pytest.fixture
def without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "recommended_weight_range", lambda: exactness.NARROW)


def weights(config: qompose.QuantizationConfig) -> tuple[Any, Any]:
    assert isinstance(config.weight, qompose.QuantizationSpec)
    return config.weight.quant_min, config.weight.quant_max


@pytest.mark.usefixtures("with_vnni")
class TestNames:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({}, "static"),
            ({"reduce_range": True}, "static, activations [0, 127]"),
            ({"is_dynamic": True}, "dynamic"),
            ({"is_dynamic": True, "reduce_range": True}, "dynamic, activations [0, 127]"),
            ({"is_dynamic": True, "per_token": True}, "dynamic per token"),
            ({"is_dynamic": True, "per_token": True, "group_size": 32},
             "dynamic int4 groups of 32 per token"),
            (WEIGHT_ONLY, "weight-only int8"),
            ({**WEIGHT_ONLY, "group_size": 64}, "weight-only int4 groups of 64"),
            ({**WEIGHT_ONLY, "group_size": 64, "symmetric": True},
             "weight-only int4 groups of 64, weights symmetric"),
            ({**WEIGHT_ONLY, "weight_qmin": -8, "weight_qmax": 7}, "weight-only int4"),
            ({**WEIGHT_ONLY, "weight_qmin": -4, "weight_qmax": 3, "group_size": 32},
             "weight-only int3 groups of 32"),
            ({**WEIGHT_ONLY, "weight_qmin": -7, "group_size": 32},
             "weight-only int8 groups of 32, weights [-7, 7]"),
            ({"weight_qmin": -127}, "static, weights [-127, 127]"),
            ({"weight_qmin": -2, "weight_qmax": 1}, "static int2"),
            ({"isa": "avx2"}, "static, weights [-64, 63]"),
            ({"attention": True}, "static, with attention"),
            ({"weight_range": "mse"}, "static, weight range mse"),
            ({"algorithms": ["bias_correction"]}, "static, algorithms bias_correction"),
            ({**WEIGHT_ONLY, "weight_range": "histogram"},
             "weight-only int8, weight range histogram"),
            ({"isa": "vnni", "range": "minmax", "balance": False},
             "static, range minmax, balance False"),
        ],
    )  # fmt: skip
    def test_say_what_was_asked(self, options: dict[str, Any], name: str) -> None:
        assert str(CONFIG(**options)) == name

    @pytest.mark.parametrize("word", ["minmax", "mse", "histogram"])
    def test_the_range_of_weights(self, word: str) -> None:
        """Static, dynamic and weights alone; and all of it is data."""
        expected = qompose.observers.weight_observer_for_range(word)
        by_token = {"is_dynamic": True, "per_token": True}
        for options in ({}, {"is_dynamic": True}, by_token, WEIGHT_ONLY):
            config = CONFIG(**options, weight_range=word)
            assert isinstance(config.weight, qompose.QuantizationSpec)
            assert config.weight.observer_or_fake_quant_ctr == expected

    def test_positions_are_those_of_torchao(self) -> None:
        assert CONFIG(False, True, True) == CONFIG(is_dynamic=True, reduce_range=True)

    def test_those_of_the_backend(self) -> None:
        names = qompose.backend.load_backend("x86_inductor").configs
        assert [name.replace(", weights [-64, 63]", "") for name in names] == [
            "static", "static, activations [0, 127]", "static, with attention", "dynamic",
            "dynamic per token", "dynamic int4 groups of 32 per token",
            "weight-only int8", "weight-only int8, with cache", "weight-only int4 groups of 32",
            "weight-only int4 groups of 32, weights symmetric", "weight-only int4 groups of 128",
            "weight-only float16", "static float8_e4m3fn",
        ]  # fmt: skip


class TestRanges:
    """Eight bits of weights where the processor's products are exact, seven elsewhere."""

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_this_machine_decides(self, dynamic: bool, without_vnni: None) -> None:
        assert weights(CONFIG(is_dynamic=dynamic)) == (-64, 63)
        assert str(CONFIG(is_dynamic=dynamic)).endswith(", weights [-64, 63]")
        assert CONFIG(is_dynamic=dynamic) == CONFIG(is_dynamic=dynamic, isa="avx2")

    def test_a_name_means_the_same_on_every_processor(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = []
        for weights in (exactness.FULL, exactness.NARROW):
            monkeypatch.setattr(
                exactness, "recommended_weight_range", lambda weights=weights: weights
            )
            found.append(configs.named())
        shared = found[0].keys() & found[1].keys()
        assert {name: found[0][name] for name in shared} == {n: found[1][n] for n in shared}
        # The code of the plugin is exact for four bits on every processor, and float8 rounds on each.
        assert all(any(w in n for w in ("weight-only", "int4", "float8")) for n in shared)

    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("avx2", (-64, 63)), ("avx512", (-64, 63)), ("vnni", (-128, 127)), ("amx", (-128, 127)),
        ],
    )  # fmt: skip
    def test_or_the_one_the_model_is_for(self, name: str, wanted: tuple[int, int]) -> None:
        assert weights(CONFIG(isa=name)) == wanted
        assert weights(CONFIG(is_dynamic=True, per_token=True, isa=name)) == wanted

    @pytest.mark.parametrize("isa", [None, "avx2"])
    def test_weights_alone_are_computed_with_in_float(
        self, isa: str | None, without_vnni: None
    ) -> None:
        assert weights(CONFIG(weight_only=True, isa=isa)) == (-128, 127)
        assert weights(CONFIG(weight_only=True, group_size=32, isa=isa)) == (-8, 7)

    def test_what_is_asked_for_goes_before(self, without_vnni: None) -> None:
        assert weights(CONFIG(weight_qmin=-127, weight_qmax=127)) == (-127, 127)

    def test_scales_of_groups_are_bfloat16(self) -> None:
        model = nn.Sequential(nn.Linear(64, 8)).eval()
        converted = convert(
            model, X86InductorQuantizer().set_global(CONFIG(weight_only=True, group_size=32))
        )
        (scale,) = [v for n, v in converted.named_buffers() if n.endswith("weight_scale")]
        assert scale.shape == (8, 2)
        assert torch.equal(scale, scale.bfloat16().float())

    def test_zero_points_of_groups_are_bytes(self, tmp_path: Path) -> None:
        """Values on one side of 0 have twice as fine a step, in each form of the model and on file."""
        model, x = nn.Linear(64, 8).eval(), torch.randn(2, 64)
        with torch.no_grad():
            model.weight.copy_(
                torch.rand(8, 64) + torch.arange(-8.0, 8).view(8, 2).repeat_interleave(32, 1)
            )
        chosen = [CONFIG(**WEIGHT_ONLY, group_size=32, symmetric=side) for side in (True, False)]
        symmetric, own = (convert(model, X86InductorQuantizer().set_global(c), x) for c in chosen)
        (zero,) = [v for n, v in own.named_buffers() if n.endswith("weight_zero_point")]
        assert zero.shape == (8, 2) and zero.dtype is torch.int8
        exact = model(x)
        assert (own(x) - exact).norm() < (symmetric(x) - exact).norm()
        qompose.save(own, tmp_path / "model.qompose")
        lowered = qompose.lower(qompose.load(tmp_path / "model.qompose"))
        assert qompose.report(lowered).rows[0].state == "float kernel on integers"
        torch.testing.assert_close(lowered(x), own(x), rtol=1e-5, atol=1e-5)


def convert(
    model: nn.Module, quantizer: qompose.Quantizer, x: Tensor | None = None
) -> torch.fx.GraphModule:
    x = torch.randn(2, 64) if x is None else x
    prepared = qompose.prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    qompose.calibrate(prepared, [(x,)])
    return qompose.convert_pt2e(prepared)


class TestWhatExcludesWhat:
    @pytest.mark.parametrize(
        ("named", "options"),
        [
            ("fake_quantize", {"fake_quantize": "learned"}),
            ("learnd", {"is_qat": True, "fake_quantize": "learnd"}),
            ("weight_only", {**WEIGHT_ONLY, "is_dynamic": True}),
            ("weight_only", {**WEIGHT_ONLY, "reduce_range": True}), ("per_token=True", {"per_token": True}),
            ("per_token=True", {"per_token": True, **WEIGHT_ONLY}),
            ("reduce_range", {"per_token": True, "is_dynamic": True, "reduce_range": True}),
            ("symmetric=False requires group_size", {**WEIGHT_ONLY, "symmetric": False}),
            ("group_size=32", {"group_size": 32}), ("group_size=32", {"group_size": 32, "is_dynamic": True}),
            ("48", {"group_size": 48, **WEIGHT_ONLY}), ("widest", {**WEIGHT_ONLY, "range": "widest"}),
            ("weight_range .*'widest'", {"weight_range": "widest"}),
            ("group_size=32.*'mse'", {**WEIGHT_ONLY, "group_size": 32, "weight_range": "mse"}),
            ("'neon'", {"isa": "neon"}), ("avx2", {"isa": ["avx2"]}), ("isa .*2", {"isa": 2}),
            ("group_size .*'32'", {**WEIGHT_ONLY, "group_size": "32"}),
            (r"group_size .*32\.0", {**WEIGHT_ONLY, "group_size": 32.0}),
            (r"-8\.0", {"weight_qmin": -8.0, "weight_qmax": 7}), ("'7'", {**WEIGHT_ONLY, "weight_qmax": "7"}),
        ],
    )  # fmt: skip
    def test_when_it_is_made(self, named: str, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=named):
            CONFIG(**options)

    @pytest.mark.parametrize(
        "name",
        [
            "is_qat",
            "is_dynamic",
            "reduce_range",
            "weight_only",
            "per_token",
            "balance",
            "symmetric",
        ],
    )
    def test_words_and_numbers_for_booleans(self, name: str) -> None:
        unset = () if name == "symmetric" else (None,)
        for value in (0, 1, *unset, "no", torch.tensor(True)):
            with pytest.raises(ConfigError, match=name):
                CONFIG(**{name: value})

    @pytest.mark.parametrize(
        ("options", "bounds"),
        [
            ({"weight_qmin": 0, "weight_qmax": 63}, "[0, 63]"),
            ({"weight_qmin": -1, "isa": "vnni"}, "[-1, 127]"),
            ({"weight_qmax": 3, "isa": "vnni"}, "[-128, 3]"),
            ({"weight_qmax": 127, "isa": "avx2"}, "[-64, 127]"),
            ({"weight_qmin": -9, "weight_qmax": 7, "is_dynamic": True}, "[-9, 7]"),
            ({"weight_qmin": -6, "weight_qmax": 7, **WEIGHT_ONLY}, "[-6, 7]"),
            ({"weight_qmax": 127, "group_size": 32, **WEIGHT_ONLY}, "[-8, 127]"),
            ({"weight_qmin": -1, "weight_qmax": 0}, "[-1, 0]"),
        ],
    )
    def test_bounds_of_weights_that_reach_further_to_one_side(
        self, options: dict[str, Any], bounds: str
    ) -> None:
        with pytest.raises(ConfigError, match=re.escape(bounds)):
            CONFIG(**options)

    @pytest.mark.parametrize("bounds", [(-8, 7), (-7, 7), (-64, 63), (-127, 127), (-1, 1)])
    def test_bounds_of_weights_that_do_not(self, bounds: tuple[int, int]) -> None:
        assert weights(CONFIG(weight_qmin=bounds[0], weight_qmax=bounds[1])) == bounds

    def test_when_it_is_set(self) -> None:
        config = CONFIG(**WEIGHT_ONLY, group_size=32, weight_qmin=-16, weight_qmax=15)
        with pytest.raises(ConfigError, match="-16"):
            X86InductorQuantizer().set_global(config)


def mixed() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.tokens(m.conv(x).flatten(2).transpose(1, 2))
        x = x + m.narrow(m.block(x))
        return m.head(torch.tanh(m.middle(x)))

    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    block = nn.Sequential(nn.Linear(64, 96), nn.GELU())
    sizes = {"tokens": (8, 64), "narrow": (96, 64), "middle": (64, 64), "head": (64, 5)}
    linears = {name: nn.Linear(*size) for name, size in sizes.items()}
    return Model(forward, conv=conv, block=block, **linears).eval()


RULES = {
    "conv.0": "conv2d_relu", "tokens": "linear", "block.0": "linear_dynamic_gelu",
    "narrow": "linear_int4_weight", "middle": "linear_dynamic_per_token",
    "head": "linear_int8_weight",
}  # fmt: skip


def test_each_module_of_a_mixed_model_has_its_kernel() -> None:
    model, x = mixed(), torch.randn(2, 3, 8, 8)
    quantizer = (
        X86InductorQuantizer()
        .set_global(CONFIG())
        .set_module_name("block", CONFIG(is_dynamic=True))
        .set_module_name("narrow", CONFIG(weight_only=True, group_size=32))
        .set_module_name("middle", CONFIG(is_dynamic=True, per_token=True))
        .set_module_name("head", CONFIG(weight_only=True))
    )
    converted = convert(model, quantizer, x)
    lowered = qompose.lower(converted, target="torch")
    rows = [row for row in qompose.report(lowered).rows if row.macs]
    assert {row.module: row.rule for row in rows} == RULES
    in_float = {row.module for row in rows if row.state == "float kernel on integers"}
    assert in_float == {"narrow", "head"}
    assert {row.state for row in rows if row.module not in in_float} == {"int8 kernel"}
    assert sqnr(converted(x), lowered(x)) > 60
    assert sqnr(model(x), lowered(x)) > 20
