# SPDX-License-Identifier: Apache-2.0
"""The backend of docs/kit.md, as its reader has it at the end, keeps the contract of every backend."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from qompose.testing import BackendContract

from tests import reader

_FOLDER = TemporaryDirectory()


def example() -> ModuleType:
    """The module that the page ends with; its file is there as long as this one is in use."""
    name = "qompose_kit_backend"
    path = Path(_FOLDER.name, f"{name}.py")
    path.write_text(reader.written("docs/kit.md")[f"{name}/__init__.py"], "utf-8")
    spec = spec_from_file_location(f"tests_of_{name}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TestKitExample(BackendContract):
    backend = example().KitBackend()
