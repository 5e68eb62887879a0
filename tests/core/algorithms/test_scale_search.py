# SPDX-License-Identifier: Apache-2.0
"""Scale search: narrower ranges of weights below eight bits, where they have a smaller error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from qompose import QuantizationConfig
from qompose.observers import PerBlockMinMaxObserver, PerChannelHistogramObserver
from qompose.spec.quantization_spec import QuantizationSpec
from torch import nn

from tests.core import toy as toys
from tests.core.algorithms.test_gptq import ALONG_ONE, BLOCKS, FOUR_BITS, PER_TENSOR, data
from tests.core.algorithms.test_smoothing import lines
from tests.core.toy import PRODUCTS, WEIGHT, convert, export, toy

FLOAT_ZERO_POINTS = QuantizationSpec(
    torch.uint8, PerBlockMinMaxObserver, 0, 15, torch.per_channel_affine_float_qparams,
    block_size=(1, 16),
)  # fmt: skip
FORMS = {
    "per tensor": PER_TENSOR, "per channel": FOUR_BITS, "blocks": BLOCKS,
    "three bits": replace(FOUR_BITS, quant_min=-4, quant_max=3),
    "float zero points": FLOAT_ZERO_POINTS,
}  # fmt: skip


def weight_only(
    spec: QuantizationSpec, algorithms: tuple[str, ...] | None = None
) -> QuantizationConfig:
    return QuantizationConfig(None, None, spec, algorithms=algorithms)


def outliers() -> nn.Linear:
    """A weight with one large value in each row, and one in each block of a few."""
    model = toys.seeded(nn.Linear(48, 16)).eval()
    with torch.no_grad():
        model.weight[:, ::16] *= 3
    return model


def run(model: nn.Module, config: QuantizationConfig, *shape: int) -> torch.fx.GraphModule:
    x = data(0, *shape)
    return convert(export(model, x), toy(*PRODUCTS, config=config), x)


def error(model: nn.Module, quantized: torch.fx.GraphModule, *shape: int) -> float:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) + 1
    return float((model(x) - quantized(x)).detach().square().mean())


@pytest.mark.parametrize("form", FORMS)
def test_below_eight_bits_the_error_becomes_smaller(form: str) -> None:
    model, shape = outliers(), (64, 48)
    searched, plain = (run(model, weight_only(FORMS[form], w), *shape) for w in (None, ()))
    made, refused = lines(searched, "scale_search")
    assert len(made) == 1 and not refused and lines(plain, "scale_search") == ([], [])
    assert error(model, searched, *shape) < 0.97 * error(model, plain, *shape)


@pytest.mark.parametrize(
    "model, shape, spec",
    [
        (nn.Conv2d(8, 8, 3, groups=4), (8, 8, 9, 9), FOUR_BITS),
        (nn.ConvTranspose2d(8, 8, 2), (8, 8, 6, 6), ALONG_ONE),
        (nn.Conv1d(8, 8, 3), (8, 8, 9), replace(BLOCKS, block_size=(1, 4, -1))),
    ],
)
def test_in_every_layout_of_a_weight(
    model: nn.Module, shape: tuple[int, ...], spec: QuantizationSpec
) -> None:
    model = toys.seeded(model).eval()
    searched, plain = (run(model, weight_only(spec, words), *shape) for words in (None, ()))
    assert error(model, searched, *shape) < error(model, plain, *shape)


def test_other_ranges_than_that_of_all_values_are_left_alone() -> None:
    searching = replace(FOUR_BITS, observer_or_fake_quant_ctr=PerChannelHistogramObserver)
    model = outliers()
    assert lines(run(model, weight_only(searching), 64, 48), "scale_search") == ([], [])
    made, refused = lines(
        run(model, weight_only(searching, ("scale_search",)), 64, 48), "scale_search"
    )
    assert made == [] and len(refused) == 1
    assert lines(run(model, weight_only(WEIGHT), 64, 48), "scale_search") == ([], [])


def test_scales_stay_those_that_a_kernel_can_store() -> None:
    stored = BLOCKS.observer_or_fake_quant_ctr.with_args(scale_dtype=torch.bfloat16)
    model = outliers()
    converted = run(model, weight_only(replace(BLOCKS, observer_or_fake_quant_ctr=stored)), 64, 48)
    scale = converted.get_buffer("weight_scale")
    assert torch.equal(scale, scale.bfloat16().float()) and len(scale.unique()) > 8
    floor = FOUR_BITS.observer_or_fake_quant_ctr.with_args(eps=0.1)
    converted = run(
        model, weight_only(replace(FOUR_BITS, observer_or_fake_quant_ctr=floor)), 64, 48
    )
    assert float(converted.get_buffer("weight_scale").min()) >= 0.1
