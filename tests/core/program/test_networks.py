# SPDX-License-Identifier: Apache-2.0
"""The networks of published size: their sizes, their statistics, their inputs, and that they export."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.zoo import NETWORKS, ZOO, ZooModel, images, network, tokens
from tests.zoo.networks import settle
from tests.zoo.networks_scenes import CLOSING, OPENING, VOCABULARY

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


def test_the_networks_are_named_as_published_and_no_part_of_the_zoo() -> None:
    assert {n.name for n in NETWORKS} == set(PUBLISHED)
    assert not any(one is other for one in NETWORKS for other in ZOO)


@pytest.mark.parametrize("name", BUILDABLE)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    options = {} if network(name).tags & {"transformers"} else {"size": 64}  # which settles sooner
    module = network(name, **options).build()
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED[name]
    assert not any(part.training for part in module.modules())


@pytest.mark.parametrize("name", MACS)
def test_the_work_is_the_published_one(name: str) -> None:
    """Strides and sizes of feature maps, which no parameter tells."""
    module = small(name).build()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(images(1))
    assert counter.get_total_flops() / 2 == pytest.approx(MACS[name], rel=3e-3)


@pytest.mark.parametrize("name", BUILDABLE)
def test_a_network_exports_with_a_dynamic_batch_and_computes_the_same(name: str) -> None:
    model = small(name)
    module, program = model.build(), model.export(dynamic=True)
    (inputs,) = model.inputs()
    larger = torch.cat([inputs, inputs.flip(0), inputs[:1]])
    with torch.no_grad():
        logits = module(larger)
        torch.testing.assert_close(program.module()(larger), logits)
    assert logits.shape == (5, 2 if name == "bert_base" else 1000)
    assert bool((logits[0] != logits[1]).any())


@pytest.mark.parametrize("name", [n for n in ("resnet18", "bert_base") if n in BUILDABLE])
def test_a_network_exports_with_a_batch_of_one(name: str) -> None:
    model = network(name, batch=1, **SMALL.get(name, {"size": 64}))
    assert model.export().module()(*model.inputs()).shape[0] == 1


def test_two_builds_are_equal_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, other = (small("mobilenet_v2").build().state_dict() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.parametrize("name", MACS)
def test_batch_norms_have_the_statistics_of_images_that_pass_through(name: str) -> None:
    """Of other images than they settled on: mean 0 and deviation 1, before the affine part."""
    module, found = small(name).build(), []

    def record(norm: nn.BatchNorm2d, _: tuple[Tensor, ...], output: Tensor) -> None:
        normal = (output - norm.bias[:, None, None]) / norm.weight[:, None, None]
        found.append((normal.mean(dim=(0, 2, 3)).abs(), normal.std(dim=(0, 2, 3))))

    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.register_forward_hook(record)
    with torch.no_grad():
        module(images(16, 64, seed=99))
    assert len(found) >= 20
    assert all(mean.median() < 0.3 for mean, _ in found)
    assert all(0.6 < deviation.median() < 1.4 for _, deviation in found)


def test_settling_changes_nothing_but_statistics() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.25), nn.Dropout()
    ).eval()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    assert settle(module, 32) is module
    changed = {k for k, tensor in module.state_dict().items() if not torch.equal(tensor, before[k])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert module[1].momentum == 0.25
    assert not any(part.training for part in module.modules())


def test_images_are_scenes_and_not_noise() -> None:
    """Neighbours agree, there are edges, and channels, images and seeds differ."""
    made = images(8, 96, seed=3)
    assert made.shape == (8, 3, 96, 96)
    assert torch.equal(made, images(8, 96, seed=3))
    assert not torch.equal(made, images(8, 96, seed=4))
    steps = made[..., 1:] - made[..., :-1]
    assert steps.std() < 0.5 * made.std()
    kurtosis = ((steps - steps.mean()) / steps.std()).pow(4).mean()
    assert kurtosis > 20  # about 4 without edges
    channels = torch.corrcoef(made.transpose(0, 1).flatten(1))
    assert bool((channels.triu(1) < 0.99).all()) and channels.min() > 0.5
    assert made.flatten(1).mean(dim=1).std() > 0.1


def test_tokens_are_texts_with_few_frequent_and_many_rare_words() -> None:
    made = tokens(64, 32, seed=3)
    assert made.shape == (64, 32) and made.dtype == torch.int64
    assert torch.equal(made, tokens(64, 32, seed=3))
    assert not torch.equal(made, tokens(64, 32, seed=4))
    assert bool((made[:, 0] == OPENING).all()) and bool((made[:, -1] == CLOSING).all())
    words, counts = made[:, 1:-1].unique(return_counts=True)
    assert int(words.min()) >= 0 and int(words.max()) < VOCABULARY
    assert int(counts.max()) > 0.05 * 64 * 30 and int((counts == 1).sum()) > 300


def test_what_a_network_cannot_have_is_refused() -> None:
    with pytest.raises(KeyError, match="resnet19"):
        network("resnet19")
    with pytest.raises(ValueError, match="resnet18 has no number of layers to choose"):
        network("resnet18", layers=3)
