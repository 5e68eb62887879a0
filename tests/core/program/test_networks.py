# SPDX-License-Identifier: Apache-2.0
"""The networks of published size, which benchmarks use: their parameters and their work."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.zoo import NETWORKS, images, network

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "vit_b_16": 86_567_656,
    "bert_base": 109_483_778,  # the encoder's 109,482,240 and a head of 768 x 2 + 2
}
"""Parameters, by the authors and the model cards of torchvision and Hugging Face."""

MACS = {
    "resnet18": 1.814e9,
    "resnet50": 4.089e9,  # version 1 would have 3.858e9
    "mobilenet_v2": 0.301e9,
    "mobilenet_v3_large": 0.217e9,
}
"""Multiply-accumulates for one image of 224 x 224, by torchvision's model cards."""

BUILDABLE = [n.name for n in NETWORKS if "transformers" not in n.tags or find_spec("transformers")]


@pytest.mark.full
@pytest.mark.parametrize("name", BUILDABLE)
def test_parameters_and_work_are_the_published_ones(name: str) -> None:
    """Strides and sizes of feature maps, which no parameter tells, are in the work."""
    images_only = name in MACS  # smaller images do not change the parameters, which settle sooner
    module = network(name, **({"size": 64} if images_only else {})).build()
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED[name]
    assert not any(part.training for part in module.modules())
    if images_only:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(images(1))
        assert counter.get_total_flops() / 2 == pytest.approx(MACS[name], rel=3e-3)
