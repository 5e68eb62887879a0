# SPDX-License-Identifier: Apache-2.0
"""Fake-quantizers: values, gradients and parameters are those of torch, or of the paper."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose.errors import ConfigError
from qompose.observers import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    LearnableFakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelHistogramObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.observers.fake_quantize import simulate
from qompose.training import disable_range_learning, enable_range_learning
from torch import Tensor, nn

from tests.core.toy import randn

AFFINE: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_tensor_affine}
SYMMETRIC: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_tensor_symmetric}
CHANNELS: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_channel_symmetric}


def by_definition(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    steps = torch.round(x * (1.0 / scale)) + zero
    return (steps.clamp(low, high) - zero) * scale


def gradient_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    upstream = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return out.detach(), torch.autograd.grad(out, x, upstream)[0]


class TestValues:
    @settings(max_examples=40, deadline=None)
    @given(
        scale=st.floats(1e-4, 10),
        zero=st.integers(-128, 127),
        bounds=st.sampled_from([(-128, 127), (-8, 7), (-127, 127), (0, 127)]),
        seed=st.integers(0, 99),
    )
    def test_they_are_those_that_the_integers_stand_for(
        self, scale: float, zero: int, bounds: tuple[int, int], seed: int
    ) -> None:
        zero = max(bounds[0], min(bounds[1], zero))
        x, s, z = 5 * randn(50, seed=seed), torch.tensor(scale), torch.tensor(zero)
        made = FixedQParamsFakeQuantize(
            scale, zero, torch.int8, quant_min=bounds[0], quant_max=bounds[1]
        )
        assert torch.equal(made(x), by_definition(x, s, z, *bounds))
        assert made.calculate_qparams() == (s, z)

    @pytest.mark.parametrize("axis", [0, 1, 2, -1])
    def test_along_any_axis(self, axis: int) -> None:
        x = randn(4, 5, 6)
        out = FakeQuantize(PerChannelMinMaxObserver, ch_axis=axis, **CHANNELS)(x)
        for part, exact in zip(out.unbind(axis), x.unbind(axis), strict=True):
            assert torch.equal(part, FakeQuantize(MinMaxObserver, **SYMMETRIC)(exact))

    def test_float_zero_points(self) -> None:
        scheme = torch.per_channel_affine_float_qparams
        made = FakeQuantize(PerChannelMinMaxObserver, dtype=torch.uint8, qscheme=scheme, ch_axis=0)
        x = randn(4, 64)
        made(x)
        scale, zero = (v.unsqueeze(1) for v in made.calculate_qparams())
        steps = torch.round(x * (1.0 / scale) + zero)
        expected = (steps.clamp(0, 255) - zero) * scale
        torch.testing.assert_close(made(x), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("block", [(4,), (2, 4), (-1,)])
    def test_in_blocks(self, block: tuple[int, ...]) -> None:
        x = randn(4, 8)
        out = FakeQuantize(PerBlockMinMaxObserver(block_size=block, **CHANNELS))(x)
        rows, columns = (1, *block)[-2:]
        columns = 8 if columns == -1 else columns
        for i in range(0, 4, rows):
            for j in range(0, 8, columns):
                part = (slice(i, i + rows), slice(j, j + columns))
                assert torch.equal(out[part], FakeQuantize(MinMaxObserver, **SYMMETRIC)(x[part]))

    def test_at_run_time_each_batch_and_each_token_has_its_own(self) -> None:
        scheme = {"qscheme": torch.per_channel_affine, "is_dynamic": True}
        made = FakeQuantize(PlaceholderObserver(torch.int8, (-1,), **scheme))
        whole = FakeQuantize(PlaceholderObserver, is_dynamic=True, **AFFINE)
        for x in (randn(32), 100 * randn(32)):
            assert torch.equal(whole(x), FakeQuantize(MinMaxObserver, **AFFINE)(x))
        x = randn(2, 3, 16) * torch.tensor([1.0, 10.0, 100.0]).reshape(1, 3, 1)
        for token, out in zip(x.flatten(0, 1), made(x).flatten(0, 1), strict=True):
            assert torch.equal(out, FakeQuantize(MinMaxObserver, **AFFINE)(token))

    def test_a_cast(self) -> None:
        x = randn(8) * 1e-3
        assert torch.equal(FakeQuantize(PlaceholderObserver(torch.float16))(x), x.half().float())


class TestGradients:
    @pytest.mark.parametrize("axis", [None, 0, 1, 2])
    def test_are_torchs(self, axis: int | None) -> None:
        """Given the same scale and zero point, with a part of the values beyond the range."""
        x = 3 * randn(4, 5, 6)
        shape = () if axis is None else (x.shape[axis],)
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.005
        zero = torch.full(shape, 5, dtype=torch.int32)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        out = simulate(ours, scale, zero.long(), -128, 127, axis)
        kind = "tensor" if axis is None else "channel"
        function = getattr(torch, f"fake_quantize_per_{kind}_affine")
        expected = function(theirs, scale, zero, *([] if axis is None else [axis]), -128, 127)
        assert torch.equal(out, expected)
        upstream = randn(4, 5, 6, seed=2)
        got = torch.autograd.grad(out, ours, upstream)[0]
        assert torch.equal(got, torch.autograd.grad(expected, theirs, upstream)[0])
        assert 0 < int((got == 0).sum()) < got.numel(), "some are clipped"

    def test_through_blocks_and_tokens(self) -> None:
        scheme = {"qscheme": torch.per_channel_affine, "is_dynamic": True}
        made = FakeQuantize(PlaceholderObserver(torch.int8, (-1,), **scheme))
        x = randn(4, 8).requires_grad_()
        for row, whole in zip(x, torch.autograd.grad(made(x).sum(), x)[0], strict=True):
            single = FakeQuantize(PlaceholderObserver(**AFFINE, is_dynamic=True))
            assert torch.equal(torch.autograd.grad(single(row).sum(), row)[0], whole)
        bounds = {"quant_min": -127, "quant_max": 127, **CHANNELS}
        blocks = FakeQuantize(PerBlockMinMaxObserver(block_size=(4,), **bounds))
        _, gradient = gradient_of(blocks, randn(4, 8))
        assert torch.equal(gradient, torch.linspace(-1, 1, 32).reshape(4, 8))


class TestFused:
    """It trains as torch's class of this name does, bit by bit, and is converted by its range."""

    SCHEMES = (
        torch.per_tensor_affine, torch.per_tensor_symmetric,
        torch.per_channel_affine, torch.per_channel_symmetric,
    )  # fmt: skip

    @pytest.mark.parametrize("scheme", SCHEMES, ids=str)
    @pytest.mark.parametrize("bounds", [(-128, 127), (-127, 127), (-8, 7), (-7, 7)], ids=str)
    def test_values_are_torchs(self, scheme: Any, bounds: tuple[int, int]) -> None:
        channels = scheme in (torch.per_channel_affine, torch.per_channel_symmetric)
        kind = (
            "MovingAveragePerChannelMinMaxObserver" if channels else "MovingAverageMinMaxObserver"
        )
        arguments = dict(zip(("quant_min", "quant_max"), bounds, strict=True), qscheme=scheme)
        ours = FusedMovingAvgObsFakeQuantize(
            getattr(qompose.observers, kind), dtype=torch.int8, **arguments
        )
        theirs = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
            getattr(torch.ao.quantization, kind), dtype=torch.qint8, **arguments
        )
        for seed, size in enumerate((1.0, 3.0, 1e-6, 1.0)):
            for x in (size * randn(4, 5, seed=seed), size * randn(4, 5, seed=seed).abs()):
                assert torch.equal(ours(x), theirs(x))
        inner = ours.activation_post_process
        for one, other in zip(ours.calculate_qparams(), inner.calculate_qparams(), strict=True):
            assert torch.equal(one, other)

    def test_other_axes_are_as_the_first(self) -> None:
        x = randn(4, 5)
        one, other = (FusedMovingAvgObsFakeQuantize(ch_axis=axis, **CHANNELS) for axis in (0, 1))
        assert torch.equal(one(x), other(x.T).T)

    def test_with_a_float_zero_point_it_is_as_any(self) -> None:
        scheme: dict[str, Any] = {
            "qscheme": torch.per_channel_affine_float_qparams,
            "dtype": torch.uint8,
        }
        observer, x = qompose.observers.MovingAveragePerChannelMinMaxObserver, randn(4, 5)
        made = (kind(observer, **scheme) for kind in (FusedMovingAvgObsFakeQuantize, FakeQuantize))
        one, other = (module(x) for module in made)
        assert torch.equal(one, other)


class TestObserving:
    def test_moving_averages(self) -> None:
        made = FusedMovingAvgObsFakeQuantize(averaging_constant=0.5, **AFFINE)
        for size in (1.0, 3.0):
            made(torch.tensor([-size, 2 * size]))
        assert float(made.activation_post_process.minimum) == -2.0
        assert float(made.activation_post_process.maximum) == 4.0
        with pytest.raises(ConfigError, match="MinMaxObserver"):
            FusedMovingAvgObsFakeQuantize(MinMaxObserver, **AFFINE)

    def test_what_counts_of_a_parameter_is_what_it_is_now(self) -> None:
        made = FakeQuantize(MinMaxObserver, **SYMMETRIC)
        made.constant = True
        made(torch.tensor([10.0, -3.0]))
        made(torch.tensor([1.0, -2.0]))
        assert float(made.activation_post_process.minimum) == -2.0
        assert float(made.activation_post_process.maximum) == 1.0

    def test_switches(self) -> None:
        made, x = FakeQuantize(**AFFINE), randn(16)
        made.disable_fake_quant()
        assert torch.equal(made(x), x)
        made.enable_fake_quant()
        made.disable_observer()
        before = made.calculate_qparams()
        assert not torch.equal(made(9 * x), 9 * x)
        assert made.calculate_qparams() == before
        made.enable_observer()
        made(9 * x)
        assert made.calculate_qparams() != before

    def test_any_observer(self) -> None:
        made = FakeQuantize(HistogramObserver, **AFFINE)
        x = randn(1000)
        plain = HistogramObserver(**AFFINE)
        made(x), plain(x)
        assert made.calculate_qparams() == plain.calculate_qparams()

    def test_without_data_nothing_is_rounded(self) -> None:
        made = FakeQuantize(**AFFINE)
        assert made(torch.empty(0, 3)).shape == (0, 3) and not made.calibrated
        made.disable_observer()
        assert torch.equal(made(randn(4)), randn(4))

    def test_nan_does_not_reach_the_range(self) -> None:
        made = FakeQuantize(**AFFINE)
        made(torch.tensor([1.0, math.nan, -1.0]))
        assert float(made.activation_post_process.maximum) == 1.0

    @pytest.mark.parametrize("bad", [lambda **_: nn.ReLU(), FakeQuantize, lambda **_: 3])
    def test_what_is_no_observer(self, bad: Any) -> None:
        with pytest.raises((ConfigError, TypeError)):
            FakeQuantize(bad, **AFFINE)


@pytest.mark.parametrize(
    "made",
    [
        FakeQuantize(**AFFINE), FakeQuantize(PerChannelMinMaxObserver, ch_axis=1, **CHANNELS),
        FusedMovingAvgObsFakeQuantize(ch_axis=1, **CHANNELS), LearnableFakeQuantize(ch_axis=1, **CHANNELS),
        LearnableFakeQuantize(HistogramObserver, **AFFINE), FakeQuantize(HistogramObserver, **AFFINE),
        FakeQuantize(PerChannelHistogramObserver, ch_axis=1, **CHANNELS),
    ],
    ids=lambda made: type(made).__name__,
)  # fmt: skip
def test_a_state_is_loaded_into_one_that_saw_nothing(made: FakeQuantize) -> None:
    fresh = copy.deepcopy(made)
    x = randn(4, 5)
    made(x)
    fresh.load_state_dict(made.state_dict())
    for one, other in zip(made.calculate_qparams(), fresh.calculate_qparams(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(made(x), fresh(x))
    y = 2 * randn(4, 5, seed=1)
    assert torch.equal(made(y), fresh(y)), "and goes on as the first would have"
    assert all(map(torch.equal, made.state_dict().values(), fresh.state_dict().values()))


@pytest.mark.parametrize("observer", [HistogramObserver, PerChannelHistogramObserver])
def test_a_state_without_counts_is_not_complete(observer: Any) -> None:
    arguments = CHANNELS if observer is PerChannelHistogramObserver else AFFINE
    made, fresh = (FakeQuantize(observer, **arguments) for _ in range(2))
    made(randn(4, 5))
    state = made.state_dict()
    fresh.load_state_dict(state)
    counts = "activation_post_process.counts"
    kept = state[counts].clone()
    for module in (made, fresh):
        module(9 * randn(4, 5))
    assert torch.equal(state[counts], kept), "neither goes on counting in a state"
    del state[counts]
    with pytest.raises(RuntimeError, match=r"activation_post_process\.counts"):
        fresh.load_state_dict(state)
    fresh.load_state_dict(state, strict=False)


def test_statistics_go_from_calibration_to_training() -> None:
    plain, made = MinMaxObserver(**AFFINE), FakeQuantize(MinMaxObserver, **AFFINE)
    plain(randn(100))
    made.take(plain.facts())
    assert made.calculate_qparams() == plain.calculate_qparams()
    with pytest.raises(qompose.errors.StatisticsError):
        FakeQuantize(HistogramObserver, **AFFINE).take(plain.facts())
    learned = LearnableFakeQuantize(**AFFINE)
    learned.take(plain.facts())
    assert float(learned.scale.detach()) == float(plain.calculate_qparams()[0])


class TestLearned:
    def made(self, **arguments: Any) -> LearnableFakeQuantize:
        return LearnableFakeQuantize(quant_min=-8, quant_max=7, **{**SYMMETRIC, **arguments})

    def test_the_gradient_of_the_scale_is_the_papers(self) -> None:
        made, x = self.made(use_grad_scaling=False), randn(200)
        made(x)
        with torch.no_grad():
            made.scale.mul_(0.6)
        upstream = randn(200, seed=1)
        made(x).backward(upstream)
        s = made.scale.detach()
        q = torch.round(x / s)
        inside = (q >= -8) & (q <= 7)
        expected = torch.where(inside, q - x / s, q.clamp(-8, 7)) * upstream
        assert made.scale.grad is not None
        torch.testing.assert_close(made.scale.grad, expected.sum(), rtol=1e-4, atol=1e-4)
        assert not made.zero_point.requires_grad

    @pytest.mark.parametrize("scaled", [True, False])
    def test_affine_gradients_are_torchs(self, scaled: bool) -> None:
        """Of positive zero points: torch's backward truncates negative ones towards zero."""
        x, upstream = 2 * randn(300), randn(300, seed=1)
        made = LearnableFakeQuantize(
            dtype=torch.uint8, quant_min=0, quant_max=15, qscheme=torch.per_tensor_affine,
            use_grad_scaling=scaled,
        )  # fmt: skip
        made(x)
        with torch.no_grad():
            made.scale.mul_(0.5)
        own = made.scale, made.zero_point
        scale, zero = (v.detach().clone().reshape(1).requires_grad_() for v in own)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        factor = (x.numel() * 15) ** -0.5 if scaled else 1.0
        function = torch._fake_quantize_learnable_per_tensor_affine
        expected = torch.autograd.grad(
            function(theirs, scale, zero, 0, 15, factor), (theirs, scale, zero), upstream
        )
        got = torch.autograd.grad(made(ours), (ours, *own), upstream)
        for mine, other in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, other.reshape(mine.shape), rtol=1e-4, atol=1e-5)

    def test_a_zero_point_beyond_the_integers_finds_its_way_back(self) -> None:
        """It counts as the last integer, and has the gradients that it would have there."""
        made, x = self.made(qscheme=torch.per_tensor_affine), randn(200)
        made(x)
        gradients = []
        for point in (7.0, 9.0):
            with torch.no_grad():
                made.zero_point.fill_(point)
            made.zero_point.grad = None
            made(x).sum().backward()
            assert int(made.calculate_qparams()[1]) == 7
            assert made.zero_point.grad is not None
            gradients.append(made.zero_point.grad)
        assert bool(gradients[0]) and torch.equal(*gradients)

    def test_what_it_computes_is_what_is_deployed(self) -> None:
        made, x = self.made(qscheme=torch.per_tensor_affine), randn(100)
        made(x)
        with torch.no_grad():
            made.scale.mul_(-0.7)
            made.zero_point.add_(0.4)
        scale, zero = made.calculate_qparams()
        assert float(scale) > 0 and zero.dtype is torch.int64
        assert torch.equal(made(x).detach(), by_definition(x, scale, zero, -8, 7))

    @pytest.mark.parametrize(
        "observer",
        [
            PlaceholderObserver(torch.int8, is_dynamic=True),
            PerBlockMinMaxObserver(block_size=(4,), **CHANNELS),
            PlaceholderObserver(torch.float16),
        ],
        ids=["dynamic", "blocks", "cast"],
    )
    def test_what_has_nothing_to_learn(self, observer: Any) -> None:
        with pytest.raises(ConfigError):
            LearnableFakeQuantize(observer)


@pytest.mark.parametrize("scheme", [torch.per_tensor_affine, torch.per_tensor_symmetric], ids=str)
def test_learning_is_switched_off_and_on(scheme: torch.qscheme) -> None:
    """The scale, and the zero point where it is learned, get gradients while it is on."""
    made = LearnableFakeQuantize(dtype=torch.int8, qscheme=scheme)
    model, x = nn.Sequential(made), randn(4, 3).requires_grad_()
    model(x)
    learned = [*made.parameters()]
    for switch, on in ((disable_range_learning, False), (enable_range_learning, True)):
        model.apply(switch)
        for parameter in learned:
            parameter.grad = None
        model(x).square().sum().backward()
        assert [parameter.grad is not None for parameter in learned] == [on] * len(learned)
        assert made.learning_enabled.tolist() == [on]


@pytest.mark.parametrize(
    "kind", [FakeQuantize, FusedMovingAvgObsFakeQuantize, LearnableFakeQuantize]
)
def test_bounds_are_taken_by_position_as_in_torch(kind: Any) -> None:
    """After the observer: its class, a factory or an observer that has them itself."""
    for observer in (None, MovingAverageMinMaxObserver):
        made = kind(observer, -8, 7, **SYMMETRIC)
        inner = made.activation_post_process
        assert (made.quant_min, made.quant_max) == (inner.quant_min, inner.quant_max) == (-8, 7)
    assert kind(inner, -8, 7).activation_post_process is inner
    with pytest.raises(ConfigError):
        kind(inner, -8, 3)


def test_whether_gradients_are_scaled_comes_behind_the_bounds() -> None:
    assert not LearnableFakeQuantize(MinMaxObserver, 0, 7, False).use_grad_scaling
