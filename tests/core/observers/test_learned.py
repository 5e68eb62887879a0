# SPDX-License-Identifier: Apache-2.0
"""Learned scales: values, gradients and parameters are those of torch, or of the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose.errors import ConfigError
from qompose.observers import LearnableFakeQuantize, PerBlockMinMaxObserver, PlaceholderObserver

from tests.core.observers.test_fake_quantize import by_definition
from tests.core.toy import randn

AFFINE: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_tensor_affine}
SYMMETRIC: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_tensor_symmetric}
CHANNELS: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_channel_symmetric}


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

    def test_parameters_are_there_from_the_start_and_an_optimizer_keeps_them(self) -> None:
        made = self.made(qscheme=torch.per_channel_symmetric, ch_axis=0)
        made.size_for(torch.Size([3, 20]))
        optimizer = torch.optim.Adam(made.parameters(), lr=0.1)
        x = randn(3, 20)
        made(x).square().sum().backward()
        first = made.scale.detach().clone()
        optimizer.step()
        assert first.shape == (3,) and not torch.equal(made.scale, first)
        fresh = self.made(qscheme=torch.per_channel_symmetric, ch_axis=0)
        fresh.load_state_dict(made.state_dict())
        assert torch.equal(fresh(x), made(x))

    def test_it_learns_to_clip(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(4000)
        made = self.made()
        before = (made(x) - x).square().mean()
        optimizer = torch.optim.Adam(made.parameters(), lr=0.01)
        for _ in range(200):
            optimizer.zero_grad()
            (made(x) - x).square().mean().backward()
            optimizer.step()
        assert bool((made(x) - x).square().mean() < 0.8 * before)

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
        with pytest.raises(ConfigError, match="learns the scale of integers"):
            LearnableFakeQuantize(observer)
