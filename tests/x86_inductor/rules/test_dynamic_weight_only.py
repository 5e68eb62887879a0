# SPDX-License-Identifier: Apache-2.0
"""Models whose linears are quantized when they run, or whose weights alone are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose import QuantizationConfig, QuantizationSpec
from qompose.observers import PlaceholderObserver
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
    get_x86_inductor_linear_dynamic_fp16_config,
)
from qompose_x86_inductor.operators import linear_packed
from torch import Tensor, nn

from tests.core.toy import Model, sqnr
from tests.sampling import at_once

CONFIG = get_default_x86_inductor_quantization_config
KERNELS = ("int8 kernel", "float kernel on integers")


def quantized(
    model: nn.Module, config: QuantizationConfig, *inputs: Tensor, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The converted and the lowered model."""
    quantizer = X86InductorQuantizer().set_global(config)
    program = torch.export.export(model, inputs, **options)
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
    return converted, qompose.lower(converted, target="torch")


class LanguageModel(nn.Module):
    """A block of a GPT between its embedding and its head, whose vocabulary is no multiple of 16."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(203, width)
        self.before, self.between, self.behind = (nn.LayerNorm(width) for _ in range(3))
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 203, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        heads = self.projections(self.before(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.narrow(F.gelu(self.wide(self.between(x)), approximate="tanh"))
        return self.head(self.behind(x))


@pytest.fixture(scope="module")
def language() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return LanguageModel().eval(), torch.randint(0, 203, (2, 12))


class TestLanguageModel:
    @pytest.mark.parametrize(
        ("options", "rules", "states", "least"),
        [
            ({"weight_only": True, "group_size": 128}, {"linear_int4_weight": 5}, KERNELS[1:], 21),
            ({"weight_only": True}, {"linear_int8_weight": 5}, KERNELS[1:], 45),
            ({"is_dynamic": True}, {"linear_dynamic": 4, "linear_dynamic_gelu": 1}, KERNELS[:1], 36),
            ({"is_dynamic": True, "per_token": True}, {"linear_dynamic_per_token": 5},
             KERNELS[:1], 38),
            ({"is_dynamic": True, "per_token": True, "group_size": 32},
             {"linear_dynamic_per_token_groups": 5}, KERNELS[:1], 21),
        ],
    )  # fmt: skip
    def test_all_linears_have_a_kernel(
        self, language: Any, options: Any, rules: dict[str, int], states: Any, least: float
    ) -> None:
        model, tokens = language
        converted, lowered = quantized(model, CONFIG(**options), tokens)
        rows = [r for r in qompose.report(lowered).rows if r.operator == "aten.linear"]
        assert {rule: sum(r.rule == rule for r in rows) for rule in rules} == rules
        assert len(rows) == sum(rules.values())
        assert {row.state for row in rows} == {*states}
        assert sqnr(converted(tokens), lowered(tokens)) > 100
        assert sqnr(model(tokens), lowered(tokens)) > least

    @pytest.mark.parametrize(("dtype", "group_size"), [(torch.bfloat16, None), (torch.float16, 32)])
    def test_weights_alone_in_half_precision(
        self, language: Any, dtype: torch.dtype, group_size: int | None
    ) -> None:
        _, tokens = language
        torch.manual_seed(0)
        model = LanguageModel().eval()
        wanted = model(tokens)
        model = model.to(dtype)
        config = CONFIG(weight_only=True, group_size=group_size)
        _, lowered = quantized(model, config, tokens)
        rows = [r for r in qompose.report(lowered).rows if r.operator == "aten.linear"]
        assert {row.state for row in rows} == {KERNELS[1]}
        actual = lowered(tokens)
        assert actual.dtype == dtype
        assert sqnr(wanted, actual) > (21 if group_size else 42)

    def test_activations_of_half_precision_stay(self, language: Any) -> None:
        model, tokens = LanguageModel().eval().to(torch.bfloat16), language[1]
        with pytest.warns(qompose.QomposeWarning):
            _, lowered = quantized(model, CONFIG(is_dynamic=True), tokens)
        rows = [r for r in qompose.report(lowered).rows if r.operator == "aten.linear"]
        assert all("float32" in row.reason for row in rows)

    def test_any_number_of_tokens(self, language: Any) -> None:
        model, tokens = language
        length = torch.export.Dim("length", min=2, max=64)
        config = CONFIG(weight_only=True, group_size=32)
        _, lowered = quantized(model, config, tokens, dynamic_shapes=({1: length},))
        for count in (2, 7, 30):
            longer = torch.randint(0, 203, (2, count))
            assert sqnr(model(longer), lowered(longer)) > 20


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize(("bits", "least"), [(3, 8), (2, 2)])
def test_three_and_two_bits(
    language: Any, tmp_path: Path, bits: int, least: float, group_size: int | None
) -> None:
    """Kernels multiply them exactly, and a file of the converted model holds so many bits of each."""
    model, tokens = language
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    options: dict[str, Any] = {"weight_qmin": low, "weight_qmax": high, "group_size": group_size}
    converted, lowered = quantized(model, CONFIG(weight_only=True, **options), tokens)
    rows = [row for row in qompose.report(lowered).rows if row.operator == "aten.linear"]
    assert {row.state for row in rows} == {KERNELS[1]}
    assert sqnr(converted(tokens), lowered(tokens)) > 100
    assert sqnr(model(tokens), lowered(tokens)) > least
    weights = [b for name, b in converted.named_buffers() if name.endswith("weight_q")]
    assert all(int(b.min()) >= low and int(b.max()) <= high for b in weights)
    saved = sum(b.numel() for b in weights) * (8 - bits) // 8
    report = qompose.report(converted)
    held = report.bytes_after
    assert 0 <= held - saved - report.file_bytes < 0.05 * report.file_bytes
    assert f"{report.file_bytes:,} in a file" in str(report)
    qompose.save(converted, tmp_path / "model.qompose")
    described = 2**16  # the program, in JSON
    assert 0 < (tmp_path / "model.qompose").stat().st_size - report.file_bytes < described
    again = qompose.load(tmp_path / "model.qompose")
    assert torch.equal(qompose.lower(again)(tokens), lowered(tokens))
    assert qompose.report(again).file_bytes == report.file_bytes


def test_eight_bits_say_nothing_of_files(language: Any) -> None:
    model, tokens = language
    report = qompose.report(quantized(model, CONFIG(weight_only=True), tokens)[1])
    assert report.file_bytes == 0 and "in a file" not in str(report)


def dynamic(**changes: Any) -> QuantizationConfig:
    """A dynamic configuration, written by hand."""
    facts: dict[str, Any] = {
        "dtype": torch.uint8, "observer_or_fake_quant_ctr": PlaceholderObserver, "quant_min": 0,
        "quant_max": 255, "qscheme": torch.per_tensor_affine, "is_dynamic": True, **changes,
    }  # fmt: skip
    return QuantizationConfig(QuantizationSpec(**facts), None, CONFIG().weight, None)


def _projections(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    return m.q(x), m.k(x).relu(), m.v(x), m.q(x.tanh())


def test_projections_of_one_tensor_quantize_it_once() -> None:
    """With functions behind them too; every bit is that of the operators, one linear at a time."""
    layers = {name: nn.Linear(24, 16) for name in ("q", "k", "v")}
    model, x = Model(_projections, **layers).eval(), torch.randn(5, 24)
    converted, lowered = quantized(model, CONFIG(is_dynamic=True), x)
    called = Counter(str(node.target) for node in lowered.graph.nodes)
    assert called["qompose_x86.quantize_dynamic.default"] == 2
    assert called["qompose_x86.linear_dynamic.default"] == 4
    for name, wanted, function in (("q", 0, None), ("k", 1, nn.ReLU()), ("v", 2, None)):
        alone = nn.Sequential(layers[name], *([] if function is None else [function])).eval()
        assert torch.equal(quantized(alone, CONFIG(is_dynamic=True), x)[1](x), lowered(x)[wanted])
    assert min(map(sqnr, converted(x), lowered(x))) > 90
    compiled = qompose.compile_lowered(lowered)
    assert min(map(sqnr, lowered(x), compiled(x))) > 100


def test_the_least_scale_is_the_observers() -> None:
    model, x = nn.Sequential(nn.Linear(24, 16)).eval(), torch.randn(5, 24) * 0.01
    coarse = PlaceholderObserver.with_args(eps=0.002)
    converted, lowered = quantized(model, dynamic(observer_or_fake_quant_ctr=coarse), x)
    assert sqnr(converted(x), lowered(x)) > 90
    assert sqnr(quantized(model, dynamic(), x)[1](x), lowered(x)) < 60


def test_rows_may_be_symmetric() -> None:
    model, x = nn.Sequential(nn.Linear(24, 16)).eval(), torch.randn(5, 24) + 3
    by_row = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127, "block_size": (-1,)}
    config = dynamic(**by_row, qscheme=torch.per_channel_symmetric)
    converted, lowered = quantized(model, config, x)
    (call,) = [node for node in lowered.graph.nodes if node.op == "call_function"]
    assert call.target is linear_packed.OPERATOR
    sizes = linear_packed.LinearSizes(*call.args[-1])  # type: ignore[misc]
    assert sizes.rows == linear_packed.Rows.SYMMETRIC
    assert sqnr(converted(x), lowered(x)) > 90


def test_weights_may_be_float16() -> None:
    model, x = nn.Sequential(nn.Linear(24, 16)).eval(), torch.randn(5, 24)
    converted, lowered = quantized(model, get_x86_inductor_linear_dynamic_fp16_config(), x)
    (row,) = qompose.report(lowered).rows
    assert (row.rule, row.state) == ("linear_float16_weight", KERNELS[1])
    assert {v.dtype for n, v in lowered.named_buffers()} == {torch.float16}
    assert sqnr(converted(x), lowered(x)) > 100
    assert sqnr(model(x), lowered(x)) > 60


def test_a_convolution_has_no_dynamic_form_and_the_report_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)).eval()
    x = torch.randn(1, 2, 4, 4)
    _, lowered = quantized(model, CONFIG(is_dynamic=True), x)
    (row,) = [r for r in qompose.report(lowered).rows if r.operator == "aten.conv2d"]
    assert row.state == "float"
    assert "conv2d" in row.reason and "dynamic" in row.reason


def _autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.linear(x)


@pytest.mark.parametrize("group_size", at_once((None, 32), 32))
def test_weights_alone_stay_where_autocast_decides_the_type(group_size: int | None) -> None:
    """The kernels give the type of their input, which autocast makes another one."""
    model, x = Model(_autocast, linear=nn.Linear(64, 32)).eval(), torch.randn(4, 64)
    config = CONFIG(weight_only=True, group_size=group_size)
    with pytest.warns(qompose.QomposeWarning):
        _, lowered = quantized(model, config, x)
    assert lowered(x).dtype is torch.bfloat16
    (row,) = (row for row in qompose.report(lowered).rows if row.operator == "aten.linear")
    assert "bfloat16" in row.reason


@pytest.mark.parametrize(
    "options", [{"weight_only": True}, {"is_dynamic": True, "per_token": True}]
)
def test_four_bits_take_half_a_byte_and_nothing_else_is_kept(options: Any) -> None:
    """Not the int8 weight that was packed, nor floats; saved and loaded, it is the same."""
    model, x = nn.Sequential(nn.Linear(256, 512, bias=False)).eval(), torch.randn(3, 256)
    _, lowered = quantized(model, CONFIG(**options, group_size=32, symmetric=True), x)
    held = sum(t.nbytes for t in (*lowered.buffers(), *lowered.parameters()))
    columns = 4 * 512 if "is_dynamic" in options else 0
    assert held == 256 * 512 // 2 + 2 * 256 * 512 // 32 + columns
    assert qompose.report(lowered).bytes_after == held


@pytest.mark.full
@pytest.mark.parametrize("mode", ["default", "package"])
@pytest.mark.parametrize("per_token", [False, True])
def test_no_rows_are_no_error_once_compiled(per_token: bool, mode: str) -> None:
    """Nor do they end the process, as torch's template of int8 products does (torch 2.13)."""
    model, x = (
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval(),
        torch.randn(5, 64),
    )
    rows = torch.export.Dim("rows", min=0, max=64)
    config = CONFIG(is_dynamic=True, per_token=per_token)
    _, lowered = quantized(model, config, x, dynamic_shapes=({0: rows},))
    compiled = qompose.compile_lowered(lowered, mode=mode)
    for count in (0, 5):
        assert compiled(x[:count]).shape == (count, 16)
    assert sqnr(lowered(x), compiled(x)) > 60


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"weight_only": True}, {"is_dynamic": True, "per_token": True}]
)
def test_compiled_with_code_of_the_plugin_or_without(options: Any) -> None:
    model, x = nn.Sequential(nn.Linear(256, 21), nn.ReLU()).eval(), torch.randn(13, 256)
    _, lowered = quantized(model, CONFIG(**options, group_size=32), x)
    wanted = lowered(x)
    assert torch.equal(qompose.compile_lowered(lowered)(x), wanted)
    plain = qompose.compile_lowered(lowered, native_code=False)
    assert sqnr(wanted, plain(x)) > 100
    assert sqnr(wanted, qompose.compile_lowered(lowered, mode="package")(x)) > 100
