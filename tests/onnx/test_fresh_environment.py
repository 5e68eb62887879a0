# SPDX-License-Identifier: Apache-2.0
"""A file needs ONNX Runtime alone: no torch, no qompose, no onnx."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
import qompose
import torch

from tests.onnx.models import Images, images
from tests.processes import Environment, checked

pytest.importorskip("onnxruntime")
ALONE = ("onnxruntime", "numpy", "flatbuffers", "protobuf", "packaging")
"""ONNX Runtime and what it requires."""
READER = """
import sys
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(value,) = session.get_inputs()
np.savez("found.npz", *session.run(None, {value.name: np.load("x.npy")}))
for name in ("torch", "qompose", "onnx"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} is installed")
"""


@pytest.mark.full
def test_a_file_runs_where_only_onnxruntime_is_installed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (x,) = Images().eval(), images(1)[0]
    result = qompose.quantize(
        model, (x,), backends=["onnx"], calibration=images(3), target="onnxruntime", progress=False
    )
    result.model.save(tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", x.numpy())
    environment = Environment(tmp_path / "environment")
    for name in ALONE:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link = environment.packages / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    checked([environment.python, "-c", READER], cwd=tmp_path)
    arrays = np.load(tmp_path / "found.npz")
    for name, wanted in zip(arrays.files, result.model(x), strict=True):
        np.testing.assert_array_equal(arrays[name], wanted.numpy())
