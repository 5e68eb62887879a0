# SPDX-License-Identifier: Apache-2.0
"""The networks of published size, which benchmarks use: their parameters and their work."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.zoo import NETWORKS, ZooModel, images, network

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

SMALL = {"vit_b_16": {"size": 64, "layers": 2}, "bert_base": {"size": 16, "layers": 2}}
BUILDABLE = [n.name for n in NETWORKS if "transformers" not in n.tags or find_spec("transformers")]


def small(name: str) -> ZooModel:
    """The network with inputs, and where it can be layers, that a test has time for."""
    return network(name, **SMALL.get(name, {"size": 64}))


@pytest.mark.full
@pytest.mark.parametrize("name", BUILDABLE)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    options = {} if network(name).tags & {"transformers"} else {"size": 64}  # which settles sooner
    module = network(name, **options).build()
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED[name]
    assert not any(part.training for part in module.modules())


@pytest.mark.full
@pytest.mark.parametrize("name", MACS)
def test_the_work_is_the_published_one(name: str) -> None:
    """Strides and sizes of feature maps, which no parameter tells."""
    module = small(name).build()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(images(1))
    assert counter.get_total_flops() / 2 == pytest.approx(MACS[name], rel=3e-3)
