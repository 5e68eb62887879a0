# SPDX-License-Identifier: Apache-2.0
"""The example of training keeps its promises, and says so where a figure is worse."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch


@pytest.fixture(scope="module")
def qat(example: Any) -> ModuleType:
    return example("qat_digits", "sklearn", "qompose_xnnpack")


def results(qat: ModuleType, *accuracies: float, seconds: float = 60.0) -> list[Any]:
    names = ("float", "calibrated, 8 bits", "trained, 8 bits", "calibrated, 4 bits",
             "trained, 4 bits")  # fmt: skip
    return [
        qat.Result(n, [a - 0.005, a + 0.005], [1.0, seconds], [[a / 2, a]] * 2 * ("trained" in n))
        for n, a in zip(names, accuracies, strict=True)
    ]


@pytest.mark.long
def test_training_brings_accuracy_back(
    qat: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setattr(qat, "MAX_SECONDS", float("inf"))  # others run beside the tests
    code = qat.main(["--plot", str(tmp_path / "curves.svg")])
    shown = capsys.readouterr().out
    assert (code, shown.count("FAILED")) == (0, 0), shown


@pytest.mark.full
def test_the_machinery(
    qat: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    """Two networks that learn for an instant: what is measured is deployed, and what fails is said."""
    whole = qat.task.load()
    parts = [qat.task.Data(d.images[:96], d.labels[:96]) for d in whole]
    monkeypatch.setattr(qat.task, "load", lambda: parts)
    monkeypatch.setattr(qat, "NETWORKS", 2)
    monkeypatch.setattr(qat, "RANGES", ("mse",))
    for bits, epochs in ((8, 1), (4, 2)):
        monkeypatch.setitem(qat.RECIPES, bits, qat.Recipe(epochs, 1e-3, 32))
    monkeypatch.setattr(qat, "FLOAT", qat.Recipe(1, 1e-3, 32))
    made, deployed = [], qat.deployed
    monkeypatch.setattr(
        qat, "deployed", lambda p, b: made.append((b, deployed(p, b))) or made[-1][1]
    )
    picture = tmp_path / "curves.svg"
    assert qat.main(["--validate", "--plot", str(picture)]) == 1
    assert "FAILED float" in capsys.readouterr().out
    assert [bits for bits, _ in made] == [8, 8, 4, 4, 4] * 2
    assert all(qat.qompose.report(m).count("simulated (Q/DQ)") == 0 for b, m in made if b == 8)
    assert all(qat.qompose.report(m).count("int8 kernel") > 20 for b, m in made if b == 8)
    assert ElementTree.parse(picture).getroot().findall(".//{*}polyline")


@pytest.mark.full
def test_networks_are_validated_on_images_that_they_did_not_learn_from(qat: ModuleType) -> None:
    training, test = qat.task.load()
    parts = qat.splits(validates=True)
    assert sum(len(held) for _, held in parts) == len(training)
    for learned, held in parts:
        assert len(learned) + len(held) == len(training)
        rows = {image.numpy().tobytes() for image in held.images}
        assert not rows & {image.numpy().tobytes() for image in learned.images}
        assert not rows & {image.numpy().tobytes() for image in test.images}
    assert qat.splits(validates=False)[0][1].images.equal(test.images)


@pytest.mark.parametrize(
    ("accuracies", "seconds", "failed"),
    [
        ((0.99, 0.99, 0.988, 0.94, 0.98), 60, []),
        ((0.96, 0.96, 0.96, 0.90, 0.96), 60, ["float"]),
        ((0.99, 0.99, 0.987, 0.90, 0.985), 60, ["trained, 8 bits"]),
        ((0.99, 0.99, 0.99, 0.95, 0.985), 60, ["calibrated, 4 bits"]),
        ((0.99, 0.99, 0.99, 0.90, 0.979), 60, ["trained, 4 bits"]),
        ((0.99, 0.99, 0.99, 0.90, 0.985), 121, ["trained, 8 bits", "trained, 4 bits"]),
    ],
)
def test_what_is_worse_fails(
    qat: ModuleType, accuracies: tuple[float, ...], seconds: float, failed: list[str]
) -> None:
    made = qat.checks(results(qat, *accuracies, seconds=seconds))
    names = [check.what for check in made if not check.holds]
    assert [name.partition(":")[0] for name in names] == failed


def test_moved_images_are_the_digits_still(qat: ModuleType) -> None:
    images = qat.task.load()[0].images[:64]
    moved = importlib.import_module("qat_task").moved(images)
    assert moved.shape == images.shape and not moved.equal(images)
    likeness = torch.nn.functional.cosine_similarity(moved.flatten(1), images.flatten(1))
    assert float(likeness.mean()) > 0.9
