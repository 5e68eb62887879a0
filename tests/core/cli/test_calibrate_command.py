# SPDX-License-Identifier: Apache-2.0
"""`qompose calibrate`, and `qompose quantize` by its statistics, with a backend that exists only here."""

from __future__ import annotations

from pathlib import Path

import pytest
import qompose
import torch
from qompose import Statistics
from qompose.cli import main

from tests.core.backend.test_plugins import install
from tests.core.cli.test_quantize_command import ALPHA, DATA, Capture, folder, quantize

__all__ = ["folder", "install"]  # fixtures

pytestmark = pytest.mark.usefixtures("folder")


def calibrate(*arguments: str) -> int:
    return main.main(["calibrate", *arguments])


def test_statistics_are_what_python_collects(capsys: Capture) -> None:
    assert calibrate("m.pt2", *ALPHA, *DATA, "--output", "seen.json") == 0
    assert capsys.readouterr().err.startswith("qompose: wrote seen.json (2 tensors, ")
    prepared = qompose.prepare_pt2e(torch.export.load("m.pt2"), qompose.compose("alpha"))
    qompose.calibrate(prepared, torch.load("data.pt").split(2))
    assert Statistics.load("seen.json").diff(qompose.statistics(prepared)) == ()


def test_jobs_are_merged_and_quantize_goes_by_them() -> None:
    data = torch.load("data.pt")
    for number, part in enumerate([data[:2], data[2:]]):
        torch.save(part, f"part{number}.pt")
        done = calibrate(
            "m.pt2",
            *ALPHA,
            "--calibration",
            f"part{number}.pt",
            "--output",
            f"{number}.safetensors",
        )
        assert done == 0
    merging = ["--merge", "1.safetensors", "0.safetensors", "--output", "all.safetensors"]
    assert calibrate(*merging) == 0
    assert quantize(*ALPHA, "--statistics", "all.safetensors", "--output", "a.qompose") == 0
    assert quantize(*ALPHA, *DATA, "--output", "b.qompose") == 0
    x = data[:2]
    assert torch.equal(qompose.load("a.qompose")(x), qompose.load("b.qompose")(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a program and --backend or --config; or files to --merge"),
        (("m.pt2",), "name a program and --backend or --config"),
        (("m.pt2", *ALPHA), "name files of samples with --calibration"),
        (("m.pt2", "--merge", "a.json"), "--merge takes files of statistics alone"),
        (("--merge", "a.json"), "a.json: No such file"),
    ],
)
def test_refusals(capsys: Capture, arguments: tuple[str, ...], message: str) -> None:
    assert calibrate(*arguments, "--output", "seen.json") == 1
    assert message in capsys.readouterr().err
    assert not Path("seen.json").exists()


def test_both_data_and_statistics(capsys: Capture) -> None:
    assert quantize(*ALPHA, *DATA, "--statistics", "seen.json") == 1
    assert "--statistics replaces --calibration" in capsys.readouterr().err
