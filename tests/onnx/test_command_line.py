# SPDX-License-Identifier: Apache-2.0
"""`qompose quantize` writes `.onnx` files, in one piece or in two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.cli.main import main
from qompose_onnx import ONNXProgram

from tests.onnx.models import Images, images

pytest.importorskip("onnxruntime")
Quantize = Callable[..., int]


@pytest.fixture
def quantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quantize:
    """The command in a folder with a program `m.pt2` and data `data.pt`; returns its exit code."""
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Images().eval(), images(1)[0]), tmp_path / "m.pt2")
    torch.save([x for (x,) in images(2)], tmp_path / "data.pt")
    monkeypatch.chdir(tmp_path)
    command = ("quantize", "m.pt2", "--backend", "onnx", "--calibration", "data.pt", "--target")

    def run(*arguments: Any) -> int:
        return main([*command, *map(str, arguments)])

    return run


def results(path: str) -> Any:
    """What a file computes, and what the saved model does."""
    (x,) = images(1)[0]
    with torch.no_grad():
        return ONNXProgram.read(path)(x), qompose.lower(qompose.load("m.qompose"), "onnx")(x)


@pytest.mark.parametrize(
    ("target", "limit", "wanted"),
    [
        ("onnxruntime", 2**31, {"net.onnx"}),
        ("onnx", 100, {"net.onnx", "net.onnx.data"}),  # bytes of constants that fit into one file
    ],
    ids=["one file", "two files"],
)
def test_the_file_is_what_python_makes(
    quantize: Quantize, target: str, limit: int, wanted: set[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("qompose_onnx.program.LARGEST", limit)
    assert quantize(target, "--lowered", "net.onnx") == 0
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"m.pt2", "data.pt", "m.qompose", *wanted}
    printed = capsys.readouterr()
    assert "QLinearConv" in printed.out
    assert all(f"wrote {name} (" in printed.err for name in wanted)
    (tmp_path / "elsewhere").mkdir()
    for name in wanted:  # together, they can be moved
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    for found, expected in zip(*results("elsewhere/net.onnx"), strict=True):
        assert torch.equal(found, expected)


def test_no_file_is_left_where_one_cannot_be_written(
    quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("qompose_onnx.program.LARGEST", 100)
    (tmp_path / "net.onnx.data").mkdir()
    before = sorted(tmp_path.iterdir())
    assert quantize("onnx", "--lowered", "net.onnx") == 1
    assert "net.onnx.data cannot be written" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_an_operator_that_onnx_lacks_is_named_and_nothing_written(
    quantize: Quantize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.lgamma(self.inner(x))

    x = torch.randn(2, 4)
    torch.export.save(torch.export.export(Odd().eval(), (x,)), "m.pt2")
    torch.save([x], "data.pt")
    before = sorted(tmp_path.iterdir())
    assert quantize("onnx", "--lowered", "net.onnx") == 1
    assert "lgamma" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
