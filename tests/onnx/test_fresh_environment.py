# SPDX-License-Identifier: Apache-2.0
"""A file needs ONNX Runtime alone: no torch, no qompose, no onnx."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
import qompose
import torch
from torch import Tensor, nn

from tests.processes import Environment, checked

pytest.importorskip("onnxruntime")
ALONE = ("onnxruntime", "numpy", "flatbuffers", "protobuf", "packaging")
"""ONNX Runtime and what it requires."""
READER = """
import sys
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
given = np.load("given.npz")
feeds = {value.name: given[value.name] for value in session.get_inputs()}
np.savez("found.npz", *session.run(None, feeds))
for name in ("torch", "qompose", "onnx"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} is installed")
"""


class Captions(nn.Module):
    """Two inputs and a dict of results; a table, convolutions in both directions, and linears."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.down, self.up = nn.Conv2d(3, 16, 3, 2, 1), nn.ConvTranspose2d(16, 3, 2, 2)
        self.mixed, self.classes = nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, image: Tensor, ids: Tensor) -> dict[str, Tensor]:
        x = self.down(image).relu()
        both = torch.cat([x.mean((2, 3)), self.words(ids).mean(1)], 1)
        return {"image": self.up(x), "classes": self.classes(self.mixed(both).relu())}


def given(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    image = torch.randn(batch, 3, 16, 16, generator=generator)
    return {"image": image, "ids": torch.randint(50, (batch, 7), generator=generator)}


@pytest.mark.full
def test_a_file_runs_where_only_onnxruntime_is_installed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2, max=64)
    result = qompose.quantize(
        Captions(), tuple(given(4).values()), backends=["embedding", "onnx"],
        calibration=[tuple(given(size).values()) for size in (2, 3, 4)], target="onnxruntime",
        dynamic_shapes=({0: batch}, {0: batch}), strict=True, progress=False,
    )  # fmt: skip
    result.model.save(tmp_path / "model.onnx")
    others = given(9)
    np.savez(tmp_path / "given.npz", **{name: x.numpy() for name, x in others.items()})
    environment = Environment(tmp_path / "environment")
    for name in ALONE:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link = environment.packages / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    checked([environment.python, "-c", READER], cwd=tmp_path)
    arrays = np.load(tmp_path / "found.npz")
    wanted = result.model(*others.values())
    assert [*wanted] == ["image", "classes"]
    for name, expected in zip(arrays.files, wanted.values(), strict=True):
        np.testing.assert_array_equal(arrays[name], expected.numpy())
