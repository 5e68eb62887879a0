# SPDX-License-Identifier: Apache-2.0
"""The table of OpenVINO's defects: it names each module once, and tests that exist."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from qompose_onnx import openvino_defects
from qompose_onnx.openvino_defects import DEFECTS

ROOT = Path(__file__).parents[3]
SHARED = {"inserting", "table"}
"""Modules of no defect: what several use, and the table."""


def test_each_module_has_a_row() -> None:
    modules = {module.name for module in iter_modules(openvino_defects.__path__)}
    assert sorted(defect.name for defect in DEFECTS) == sorted(modules - SHARED)


def test_each_row_has_the_version_that_its_module_tells_and_tests() -> None:
    for defect in DEFECTS:
        module = import_module(f"{openvino_defects.__name__}.{defect.name}")
        assert f"OpenVINO {defect.seen}" in str(module.__doc__)
        assert (defect.settle is None) != (defect.check is None)
        assert (ROOT / defect.tests).is_file()
