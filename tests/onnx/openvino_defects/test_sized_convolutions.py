# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose size is read at run time, which OpenVINO is not to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import qompose
from qompose_onnx import ONNXProgram
from qompose_onnx.errors import ONNXTargetError

from tests.onnx.sized import converted

pytest.importorskip("openvino")


def test_one_that_is_reshaped_by_its_own_size_is_refused() -> None:
    model, _ = converted("reshape")
    with pytest.raises(ONNXTargetError, match="conv2d"):
        qompose.lower(model, "openvino")


def test_a_file_for_others_is_refused_when_it_is_called(tmp_path: Path) -> None:
    model, x = converted("reshape")
    path = qompose.lower(model, "onnx").save(tmp_path / "model.onnx")
    program = ONNXProgram.read(path, "openvino")
    with pytest.raises(ONNXTargetError, match="conv2d"):
        program(x)
