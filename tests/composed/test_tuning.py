# SPDX-License-Identifier: Apache-2.0
"""The proof: a channel of 100 times the range in one layer of a real, trained network is found and undone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.quantizer import quantizer_from_json
from torch import nn
from torch.export import Dim, export

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTOR, CHANNEL = 100.0, 3
TOUCHED = ("block2.conv1", "block2.conv2")  # what makes the channel, and what reads it


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Any, nn.Module, Any]]:
    """The task, its data, and a network in which a channel that `block2.conv2` reads is 100 times as large as
    it was, and its weights as small: it computes the same."""
    pytest.importorskip("sklearn")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        task: Any = importlib.import_module("digits_task")
        data = task.load()
        net = task.train(data[0], epochs=4)
        with torch.no_grad():
            net.block2.bn1.weight[CHANNEL] *= FACTOR
            net.block2.bn1.bias[CHANNEL] *= FACTOR
            net.block2.conv2.weight[:, CHANNEL] /= FACTOR
        yield task, net, data


def loss(net: nn.Module, data: Any) -> Callable[[Any], float]:
    """A metric: the power of the error of the test images' answers over that of the float answers."""
    with torch.no_grad():
        wanted = net(data[1].images)

    def metric(model: Any) -> float:
        found = model(data[1].images).detach()
        return -float((found - wanted).square().sum() / wanted.square().sum())

    return metric


def quantized_score(program: Any, quantizer: Any, batches: Any, metric: Any) -> float:
    prepared = qompose.calibrate(qompose.prepare_pt2e(program, quantizer), batches)
    return float(metric(qompose.convert_pt2e(prepared)))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["x86_inductor", "xnnpack"])
def test_planted_channel_is_ranked_first_and_restored(
    backend: str, trained: Any, tmp_path: Path
) -> None:
    task, net, data = trained
    rows = {0: Dim("rows", min=2, max=2048)}
    program = export(net, (data[0].images[:32],), dynamic_shapes=(rows,))
    batches, metric = task.calibration(data[0]), loss(net, data)
    quantizer = qompose.compose(backend)
    prepared = qompose.calibrate(qompose.prepare_pt2e(program, quantizer), batches)
    ranking = qompose.sensitivity(prepared, batches, limit=2, tensors=True)
    assert ranking.rows[0].module in TOUCHED
    assert max(ranking.rows[0].tensors, key=lambda tensor: tensor[1])[0] == "relu_3"

    whole = metric(qompose.convert_pt2e(prepared))
    found = qompose.tune(program, quantizer, batches, metric, -0.1 * whole)
    assert found.quantized_score == whole
    assert found.score >= 0.1 * whole  # 90 % of the loss are restored
    assert len(found.excluded) == 1  # by one operator of the thirteen or sixteen
    assert found.excluded[0].module in TOUCHED
    assert found.float_macs < 0.2 * found.macs

    found.save(tmp_path / "tuned.json")
    loaded = qompose.diagnosis.Tuning.load(tmp_path / "tuned.json")
    again = quantizer_from_json(loaded.quantizer.to_json())
    # Trials go by statistics of a program in which other batch norms are folded: rows that differ in their
    # last bits are sampled differently.
    score = pytest.approx(found.score, rel=0.05)
    assert quantized_score(program, again, batches, metric) == score
    assert quantized_score(program, loaded.apply(quantizer), batches, metric) == score
