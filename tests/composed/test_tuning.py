# SPDX-License-Identifier: Apache-2.0
"""The proof: a channel of 100 times the range in one layer of a real, trained network is found and undone."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import qompose
import torch
from qompose.quantizer import quantizer_from_json
from torch import nn
from torch.export import Dim, ExportedProgram, export

from tests.sampling import at_once

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTOR, CHANNEL, LAYER = 100.0, 3, "block2.conv2"
BACKENDS = ("x86_inductor", "xnnpack")


@pytest.fixture(scope="module")
def task() -> Iterator[ModuleType]:
    pytest.importorskip("sklearn")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("digits_task")


@pytest.fixture(scope="module")
def data(task: ModuleType) -> tuple[Any, Any]:
    return task.load()


@pytest.fixture(scope="module")
def sound(task: ModuleType, data: Any) -> nn.Module:
    return task.train(data[0], epochs=4)


@pytest.fixture(scope="module")
def planted(sound: nn.Module) -> nn.Module:
    """The same function: a channel that `block2.conv2` reads is 100 times as large, its weights as small."""
    net: Any = copy.deepcopy(sound)
    with torch.no_grad():
        net.block2.bn1.weight[CHANNEL] *= FACTOR
        net.block2.bn1.bias[CHANNEL] *= FACTOR
        net.block2.conv2.weight[:, CHANNEL] /= FACTOR
    return net


def exported(net: nn.Module, data: Any) -> ExportedProgram:
    rows = {0: Dim("rows", min=2, max=2048)}
    return export(net, (data[0].images[:32],), dynamic_shapes=(rows,))


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
@pytest.mark.parametrize("backend", at_once(BACKENDS, "x86_inductor"))
def test_planted_channel_is_ranked_first_and_restored(
    backend: str, planted: nn.Module, task: ModuleType, data: Any, tmp_path: Path
) -> None:
    program, batches, metric = (
        exported(planted, data),
        task.calibration(data[0]),
        loss(planted, data),
    )
    quantizer = qompose.compose(backend)
    prepared = qompose.calibrate(qompose.prepare_pt2e(program, quantizer), batches)
    ranking = qompose.sensitivity(prepared, batches, limit=2, tensors=True)
    assert ranking.rows[0].module == LAYER
    assert max(ranking.rows[0].tensors, key=lambda tensor: tensor[1])[0] == "relu_3"

    whole = metric(qompose.convert_pt2e(prepared))
    found = qompose.tune(program, quantizer, batches, metric, -0.05 * whole)
    assert found.quantized_score == whole
    assert found.score >= 0.05 * whole  # 95 % of the loss are restored
    assert len(found.excluded) == 1  # by one operator of the thirteen or sixteen
    assert found.excluded[0].module in (LAYER, "block2.conv1")  # which reads it, or which makes it
    assert found.float_macs < 0.2 * found.macs

    found.save(tmp_path / "tuned.json")
    loaded = qompose.diagnosis.Tuning.load(tmp_path / "tuned.json")
    again = quantizer_from_json(loaded.quantizer.to_json())
    assert quantized_score(program, again, batches, metric) == found.score
    assert quantized_score(program, loaded.apply(quantizer), batches, metric) == found.score
