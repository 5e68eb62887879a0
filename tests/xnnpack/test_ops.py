# SPDX-License-Identifier: Apache-2.0
"""The int8 kernels against int64/float64 references, in every way a graph may call them."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qompose_xnnpack import integer, ops
from torch import Tensor
from torch.nn import functional

KERNELS = torch.ops.qompose_xnnpack
FULL = (-128, 127)

scales = st.floats(1e-4, 4.0)
zero_points = st.integers(-128, 127)
seeds = st.integers(0, 2**16)
examples = settings(max_examples=40, deadline=None)


def int8(seed: int, *shape: int, extreme: bool = False) -> Tensor:
    """Values over all of int8, or only its two ends."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return torch.where(values < 0, -128, 127).to(torch.int8) if extreme else values


def weights(seed: int, *shape: int, extreme: bool = False) -> Tensor:
    return int8(seed + 1, *shape, extreme=extreme).clamp_(min=-127)


def real(q: Tensor, scale: float, zp: int) -> Tensor:
    return (q.to(torch.float64) - zp) * scale


def grid(y: Tensor, out: tuple[float, int, int, int]) -> Tensor:
    scale, zp, low, high = out
    return (torch.round(y / scale) + zp).clamp(low, high)


def assert_step(actual: Tensor, expected: Tensor, steps: int = 1) -> None:
    assert actual.dtype == torch.int8
    assert actual.is_contiguous()
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max().item() <= steps


@st.composite
def outputs(draw: Any, scale: st.SearchStrategy[float] = scales) -> tuple[float, int, int, int]:
    zp = draw(zero_points)
    return (draw(scale), zp, draw(st.sampled_from([-128, zp])), draw(st.sampled_from([127, 90])))


def clip(out: tuple[float, int, int, int]) -> tuple[float, int, int, int]:
    scale, zp, low, high = out
    return (scale, zp, min(low, high), high)


class TestIntegerProducts:
    @examples
    @given(st.integers(1, 40), st.sampled_from([1, 3, 64, 1023, 1025, 3000]), seeds, st.booleans())
    def test_matmul_is_exact(self, rows: int, depth: int, seed: int, extreme: bool) -> None:
        x = int8(seed, rows, depth, extreme=extreme)
        weight = weights(seed, 5, depth, extreme=extreme)
        expected = x.long() @ weight.long().t()
        assert torch.equal(integer.matmul(x, weight).long(), expected)
        assert torch.equal(integer._matmul_float(x, weight).long(), expected)

    @pytest.mark.parametrize("rows", [1, 5])
    @pytest.mark.parametrize("depth", [1, 2, 70])
    @pytest.mark.parametrize("columns", [1, 6])
    def test_strides_of_single_axes_mean_nothing(self, rows: int, depth: int, columns: int) -> None:
        def odd(tensor: Tensor) -> Tensor:
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            return tensor.as_strided(tensor.shape, [0 if n == 1 else step for n, step in pairs])

        x, weight = int8(0, rows, depth), weights(0, columns, depth)
        expected = x.long() @ weight.long().t()
        assert torch.equal(integer.matmul(odd(x), odd(weight)).long(), expected)

    def test_matmul_of_all_extremes(self) -> None:
        x = torch.full((2, 4096), -128, dtype=torch.int8)
        assert (integer.matmul(x, x) == 4096 * 128 * 128).all()
        assert (integer._matmul_float(x, x) == 4096 * 128 * 128).all()

    @pytest.mark.parametrize(
        ("groups", "channels", "kernel"), [(1, 6, 3), (6, 6, 3), (2, 8, 3), (2, 600, 1), (1, 4, 1)]
    )
    def test_convolution_is_exact(self, groups: int, channels: int, kernel: int) -> None:
        x = int8(0, 2, channels, 9, 8, extreme=True)
        weight = weights(0, 6, channels // groups, kernel, kernel, extreme=True)
        args = ([2, 1], [1, 0], [1, 2], groups)
        actual = integer.conv2d(x, -77, weight, *args)
        exact = functional.conv2d(x.double() + 77, weight.double(), None, *args)
        assert torch.equal(actual.double(), exact)

    def test_autocast_and_lower_precision_change_nothing(self) -> None:
        x, weight = int8(0, 7, 1500, extreme=True), weights(0, 9, 1500, extreme=True)
        image, kernel = int8(1, 1, 4, 6, 6), weights(1, 4, 1, 3, 3)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                product = integer._matmul_float(x, weight)
                total = integer.conv2d(image, 9, kernel, [1, 1], [1, 1], [1, 1], 4)
        finally:
            torch.set_float32_matmul_precision(before)
        assert torch.equal(product.long(), x.long() @ weight.long().t())
        exact = functional.conv2d(image.double() - 9, kernel.double(), padding=1, groups=4)
        assert torch.equal(total.double(), exact)

    def test_a_batch_is_split_when_its_windows_are_large(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, weight = int8(0, 5, 3, 8, 8), weights(0, 4, 3, 3, 3)
        args = ([1, 1], [1, 1], [1, 1], 1)
        whole = integer.conv2d(x, 3, weight, *args)
        monkeypatch.setattr(integer, "_WINDOW_BYTES", 1)
        assert torch.equal(integer.conv2d(x, 3, weight, *args), whole)

    def test_depth_beyond_int32_is_refused(self) -> None:
        x = torch.zeros((1, integer.MAX_DEPTH + 1), dtype=torch.int8)
        with pytest.raises(ValueError, match="int32 range"):
            integer.matmul(x, x)

    def test_cached_sums_follow_the_weight(self) -> None:
        gc.collect()
        entries = len(integer.row_sums)
        weight = weights(0, 3, 4)
        first = integer.row_sums(weight).clone()
        assert integer.row_sums(weight) is integer.row_sums(weight)
        weight.neg_()
        assert torch.equal(integer.row_sums(weight), -first)
        assert len(integer.row_sums) == entries + 1
        del weight
        gc.collect()
        assert len(integer.row_sums) == entries


class TestWeighted:
    @examples
    @given(seeds, scales, zero_points, outputs(), st.booleans(), st.booleans(), st.booleans())
    def test_linear(
        self,
        seed: int,
        x_scale: float,
        x_zp: int,
        out: tuple[float, int, int, int],
        extreme: bool,
        with_bias: bool,
        per_channel: bool,
    ) -> None:
        x, weight = int8(seed, 2, 3, 70, extreme=extreme), weights(seed, 6, 70, extreme=extreme)
        w_scale = torch.rand(6 if per_channel else 1) * 0.02 + 1e-4
        unit = x_scale * w_scale.double()
        bias = (torch.randn(6) * 1e3 * unit).float() if with_bias else None
        out = clip(out)
        exact = functional.linear(real(x, x_scale, x_zp), weight.double() * w_scale[:, None])
        exact = exact if bias is None else exact + (bias / unit).round() * unit
        assert_step(KERNELS.linear(x, x_scale, x_zp, weight, w_scale, bias, *out), grid(exact, out))

    @examples
    @given(
        seeds, zero_points, outputs(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2),
        st.sampled_from([(1, 4), (4, 4), (4, 8), (2, 6)]), st.sampled_from([1, 2, 3]),
    )  # fmt: skip
    def test_conv2d(
        self,
        seed: int,
        x_zp: int,
        out: tuple[float, int, int, int],
        stride: int,
        padding: int,
        dilation: int,
        grouping: tuple[int, int],
        kernel: int,
    ) -> None:
        groups, out_channels = grouping
        x = int8(seed, 2, 4, 9, 11)
        weight = weights(seed, out_channels, 4 // groups, kernel, kernel)
        w_scale = torch.rand(out_channels) * 0.02 + 1e-4
        # Whole units, since a bias is stored as an integer count of them.
        bias = torch.randint(-5000, 5000, (out_channels,)) * 0.03 * w_scale
        geometry = ([stride], [padding], [dilation], groups)
        out = clip(out)
        exact = functional.conv2d(
            real(x, 0.03, x_zp),
            weight.double() * w_scale.double()[:, None, None, None],
            bias.double(),
            *(part[0] if isinstance(part, list) else part for part in geometry),
        )
        actual = KERNELS.conv2d(x, 0.03, x_zp, weight, w_scale, bias, *geometry, *out)
        assert_step(actual, grid(exact, out))
        channels_last = x.to(memory_format=torch.channels_last)
        again = KERNELS.conv2d(channels_last, 0.03, x_zp, weight, w_scale, bias, *geometry, *out)
        assert torch.equal(again, actual)

    def test_conv1d_is_conv2d_of_one_row(self) -> None:
        x, weight = int8(0, 2, 4, 15), weights(0, 6, 2, 3)
        rest = (torch.full((6,), 0.01), torch.randn(6))
        out = (0.1, 3, *FULL)
        line = KERNELS.conv1d(x, 0.03, 7, weight, *rest, [2], [1], [1], 2, *out)
        row = KERNELS.conv2d(
            x[:, :, None], 0.03, 7, weight[:, :, None], *rest, [1, 2], [0, 1], [1, 1], 2, *out
        )
        assert torch.equal(line, row[:, :, 0])

    def test_a_huge_bias_saturates_instead_of_wrapping(self) -> None:
        x, weight = (
            torch.full((1, 8), 127, dtype=torch.int8),
            torch.full((2, 8), 127).to(torch.int8),
        )
        bias = torch.tensor([1e30, -1e30])
        actual = KERNELS.linear(x, 1e-3, 0, weight, torch.ones(1), bias, 1.0, 0, *FULL)
        assert actual.tolist() == [[127, -128]]

    def test_an_empty_batch(self) -> None:
        out = (0.1, 0, *FULL)
        one = torch.ones(1)
        linear = KERNELS.linear(int8(0, 0, 4), 0.1, 3, weights(0, 2, 4), one, None, *out)
        conv = KERNELS.conv2d(
            int8(0, 0, 4, 5, 5), 0.1, 3, weights(0, 2, 4, 3, 3), one, None, [1], [1], [1], 1, *out
        )
        assert (linear.shape, conv.shape) == ((0, 2), (0, 2, 5, 5))


class TestPairs:
    @pytest.mark.parametrize(("name", "function"), [("add", torch.add), ("mul", torch.mul)])
    def test_ranges(self, name: str, function: Callable[..., Tensor]) -> None:
        @examples
        @given(seeds, scales, zero_points, scales, zero_points, outputs(), st.booleans())
        def check(
            seed: int,
            a_scale: float,
            a_zp: int,
            b_scale: float,
            b_zp: int,
            out: tuple[float, int, int, int],
            extreme: bool,
        ) -> None:
            a, b = int8(seed, 2, 3, 8, extreme=extreme), int8(seed + 1, 3, 1, extreme=extreme)
            limits = clip(out)
            exact = function(real(a, a_scale, a_zp), real(b, b_scale, b_zp))
            actual = getattr(KERNELS, name)(a, a_scale, a_zp, b, b_scale, b_zp, *limits)
            assert_step(actual, grid(exact, limits))

        check()

    @pytest.mark.parametrize("ratio", [1e-12, 1e-6, 2.0**-10, 2.0**8, 2.0**19, 1e9])
    def test_add_at_ratios_beyond_fixed_point(self, ratio: float) -> None:
        a, b = int8(0, 64), int8(1, 64)
        exact = real(a, ratio, -5) + real(b, ratio, 7)
        actual = KERNELS.add(a, ratio, -5, b, ratio, 7, 1.0, 3, *FULL)
        assert_step(actual, grid(exact, (1.0, 3, *FULL)))


POOLS: dict[str, tuple[str, tuple[Any, ...], Callable[[Tensor], Tensor]]] = {
    "avg": ("avg_pool2d", ([3], [2], [0], False, True, None),
            lambda x: functional.avg_pool2d(x, 3, 2)),
    "avg, default stride": ("avg_pool2d", ([2, 3], [], [0], False, True, None),
                            lambda x: functional.avg_pool2d(x, (2, 3))),
    "avg, padding not counted": ("avg_pool2d", ([3], [2], [1], True, False, None),
                                 lambda x: functional.avg_pool2d(x, 3, 2, 1, True, False)),
    "avg, divisor": ("avg_pool2d", ([3, 3], [1, 1], [1, 1], False, True, 5),
                     lambda x: functional.avg_pool2d(x, 3, 1, 1, divisor_override=5)),
    "adaptive": ("adaptive_avg_pool2d", ([3, 2],),
                 lambda x: functional.adaptive_avg_pool2d(x, (3, 2))),
    "mean": ("mean", ([2, 3], False), lambda x: x.mean([2, 3])),
    "mean, kept": ("mean", ([-1], True), lambda x: x.mean(-1, keepdim=True)),
    "mean of all": ("mean", (None, False), lambda x: x.mean()),
}  # fmt: skip


class TestPools:
    @pytest.mark.parametrize("case", POOLS)
    def test_averages(self, case: str) -> None:
        name, args, function = POOLS[case]

        @examples
        @given(seeds, scales, zero_points, outputs(), st.booleans())
        def check(
            seed: int, scale: float, zp: int, out: tuple[float, int, int, int], extreme: bool
        ) -> None:
            x, limits = int8(seed, 2, 3, 9, 8, extreme=extreme), clip(out)
            actual = getattr(KERNELS, name)(x, scale, zp, *args, *limits)
            assert_step(actual, grid(function(real(x, scale, zp)), limits))

        check()

    def test_max_is_exact(self) -> None:
        x = int8(0, 2, 3, 9, 8)
        actual = KERNELS.max_pool2d(x, [3], [2], [1], [1], True, -20, 100)
        exact = functional.max_pool2d(x.double(), 3, 2, 1, ceil_mode=True).clamp(-20, 100)
        assert_step(actual, exact, steps=0)


class AllKernels(torch.nn.Module):
    """Every operator once, on one image."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("conv", weights(0, 8, 4, 3, 3))
        self.register_buffer("deep", weights(1, 8, 1, 3, 3))
        self.register_buffer("line", weights(2, 8, 8, 3))
        self.register_buffer("head", weights(3, 5, 8))
        self.register_buffer("scale", torch.full((8,), 0.01))
        self.register_buffer("bias", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        out = (0.1, 2, *FULL)
        geometry = ([1, 1], [1, 1], [1, 1])
        y = KERNELS.conv2d(x, 0.1, 2, self.conv, self.scale, self.bias, *geometry, 1, *out)
        z = KERNELS.conv2d(y, 0.1, 2, self.deep, self.scale, None, *geometry, 8, *out)
        y = KERNELS.mul(KERNELS.add(y, 0.1, 2, z, 0.1, 2, *out), 0.1, 2, y, 0.1, 2, *out)
        y = KERNELS.max_pool2d(y, [2], [2], [0], [1], False, *FULL)
        y = KERNELS.avg_pool2d(y, 0.1, 2, [2], [1], [0], False, True, None, *out)
        pooled = KERNELS.adaptive_avg_pool2d(y, 0.1, 2, [1, 4], *out)
        row = KERNELS.conv1d(
            pooled.squeeze(2), 0.1, 2, self.line, self.scale, self.bias, [1], [1], [1], 1, *out
        )
        flat = KERNELS.mean(row, 0.1, 2, [2], False, *out)
        scale = self.scale[:1]
        result: Tensor = KERNELS.linear(flat, 0.1, 2, self.head, scale, None, *out)
        return result


class TestGraphs:
    def test_every_operator_is_called(self) -> None:
        targets = {
            str(node.target)
            for node in torch.export.export(AllKernels(), (int8(0, 2, 4, 9, 9),)).graph.nodes
        }
        assert {f"qompose_xnnpack.{name}.default" for name in ops.SCHEMAS} <= targets

    def test_export_with_dynamic_shapes_and_deepcopy(self) -> None:
        model, x = copy.deepcopy(AllKernels()), int8(0, 2, 4, 9, 9)
        shapes = ({0: torch.export.Dim("batch"), 3: torch.export.Dim("width", min=6)},)
        exported = torch.export.export(model, (x,), dynamic_shapes=shapes)
        for shape in ((2, 4, 9, 9), (5, 4, 9, 12)):
            x = int8(1, *shape)
            assert torch.equal(exported.module()(x), model(x))

    def test_compile_with_dynamic_shapes(self) -> None:
        model = AllKernels()
        compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
        with torch.inference_mode():
            for shape in ((2, 4, 9, 9), (5, 4, 9, 12)):
                x = int8(1, *shape).to(memory_format=torch.channels_last)
                assert torch.equal(compiled(x), model(x))

    @pytest.mark.parametrize("name", list(ops.SCHEMAS))
    def test_operators_keep_the_contract_of_torch(self, name: str) -> None:
        calls: list[tuple[Any, ...]] = []
        operator = getattr(KERNELS, name).default

        class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func is operator:
                    calls.append(args)
                return func(*args, **(kwargs or {}))

        with Recorder():
            AllKernels()(int8(0, 2, 4, 9, 9))
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, calls[0], test_utils=checks)

    def test_wrong_inputs_are_named(self) -> None:
        out = (0.1, 2, *FULL)
        with pytest.raises(TypeError, match=r"qompose_xnnpack::add takes int8.*float32"):
            KERNELS.add(torch.ones(3), 0.1, 0, int8(0, 3), 0.1, 0, *out)
        with pytest.raises(ValueError, match=r"qompose_xnnpack::linear: input \(2, 4\)"):
            KERNELS.linear(int8(0, 2, 4), 0.1, 0, weights(0, 3, 5), torch.ones(1), None, *out)


@pytest.mark.skipif("QOMPOSE_WITHOUT_VNNI" in os.environ, reason="this is that run")
def test_the_same_without_vnni() -> None:
    """oneDNN saturates silently without VNNI; the variable must be set before torch is loaded."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "QOMPOSE_WITHOUT_VNNI": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    probe = "from qompose_xnnpack import integer; print(integer.int_mm_is_exact())"
    code = [sys.executable, "-c", probe]
    probed = subprocess.run(code, env=environment, capture_output=True, text=True, check=True)
    assert probed.stdout.strip() in {"True", "False"}
