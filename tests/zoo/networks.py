# SPDX-License-Identifier: Apache-2.0
"""Networks of published size with random weights: what they are called, what they take, how they are aged.

The convolutional ones need torch alone; those tagged `transformers` need that package to be built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .entry import LARGEST_BATCH, Draw, ZooModel, zoo_model
from .networks_mobile import mobilenet_v2, mobilenet_v3_large
from .networks_resnet import resnet18, resnet50
from .networks_scenes import draw_images, draw_tokens, images
from .transformers_family import make

BATCH = 2
"""The least that exports with a dynamic batch."""
SETTLING_BATCHES = 2
FEWEST, MOST, PIXELS = 8, 32, 2**19
"""Images of a batch that batch norms settle on: as many as have so many pixels, within bounds."""

Make = Callable[[int, int], nn.Module]
"""Makes a module for inputs of a size, with so many layers where they can be chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What a network is made by; `layers` is the published number, or 0 where it is fixed."""

    make: Make
    draw: Callable[[int, int], Draw]
    size: int
    tags: frozenset[str]
    layers: int = 0


class Logits(nn.Module):
    """A classifier of `transformers`, of one input; its logits `(N, classes)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs, return_dict=False)[0]


def _vit(size: int, layers: int) -> nn.Module:
    """ViT-B/16 by Dosovitskiy et al., "An image is worth 16x16 words" (2020), table 1."""
    sizes = {"image_size": size, "patch_size": 16, "num_labels": 1000}
    return _transformer("ViTForImageClassification", layers, **sizes)


def _bert(size: int, layers: int) -> nn.Module:
    """BERT base, uncased, with a head for two classes; it takes texts of up to 512 tokens."""
    if size > 512:
        raise ValueError(f"bert_base takes at most 512 tokens, not {size}")
    return _transformer("BertForSequenceClassification", layers, vocab_size=30522, num_labels=2)


def _transformer(kind: str, layers: int, **config: object) -> nn.Module:
    base: dict[str, object] = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "attn_implementation": "eager",  # matrix products and softmax that a quantizer can see
    }
    return Logits(make(kind, base | config))


def _pixels(batch: int, size: int) -> Draw:
    return lambda generator: draw_images(batch, size, generator)


def _words(batch: int, size: int) -> Draw:
    return lambda generator: draw_tokens(batch, size, generator)


def _convolutional(make_module: Callable[[], nn.Module], *tags: str) -> _Family:
    every = frozenset({"conv", "bn", "image", *tags})
    return _Family(make=lambda _size, _layers: make_module(), draw=_pixels, size=224, tags=every)


_TEXT = frozenset({"transformers", "attention", "matmul"})
_FAMILIES: dict[str, _Family] = {
    "resnet18": _convolutional(resnet18),
    "resnet50": _convolutional(resnet50),
    "mobilenet_v2": _convolutional(mobilenet_v2, "depthwise"),
    "mobilenet_v3_large": _convolutional(mobilenet_v3_large, "depthwise"),
    "vit_b_16": _Family(make=_vit, draw=_pixels, size=224, layers=12, tags=_TEXT | {"conv", "image"}),
    "bert_base": _Family(make=_bert, draw=_words, size=128, layers=12, tags=_TEXT | {"embedding", "text"}),
}  # fmt: skip


def network(
    name: str, *, size: int | None = None, layers: int | None = None, batch: int = BATCH
) -> ZooModel:
    """A network as published, or with inputs of another size (in pixels or tokens), or fewer layers, which a
    transformer may have. To be exported with a dynamic batch, `inputs()` must have two at least."""
    family = _FAMILIES[name]
    if layers is not None and not family.layers:
        raise ValueError(f"{name} has no number of layers to choose")
    size, layers = size or family.size, layers or family.layers
    # Not `dynamic`: it would draw the inputs to learn their shapes, and so all images on import.
    entry = zoo_model(
        name,
        lambda: family.make(size, layers),
        family.draw(batch, size),
        tags=family.tags,
        dynamic=False,
    )
    rows = torch.export.Dim("batch", min=2, max=LARGEST_BATCH)
    return replace(entry, build=lambda: settle(entry.build(), size), dynamic_shapes=({0: rows},))


def settle(module: nn.Module, size: int) -> nn.Module:
    """Give the batch norms of a module, in eval mode, the statistics of images that pass through it.

    The images have sides of `size` pixels, for statistics of small ones do not fit large ones: more of
    their features lie at a border. Everything else stays in eval mode. The module is changed in place
    and returned.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over batches
        norm.train()
    count = max(FEWEST, min(MOST, PIXELS // size**2))
    with torch.no_grad():
        for seed in range(SETTLING_BATCHES if norms else 0):
            module(images(count, size, seed))
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
        norm.eval()
    return module


NETWORKS: tuple[ZooModel, ...] = tuple(network(name) for name in _FAMILIES)
