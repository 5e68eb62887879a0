# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ as modules, each with its neighbours beside it."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example() -> Iterator[Callable[..., ModuleType]]:
    """Call it with a script's name and the packages that it needs: without one, the test is skipped.

    They are looked for, not imported: ExecuTorch and the weights' package warn, and are slow.
    """

    def load(name: str, *packages: str) -> ModuleType:
        for package in packages:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        return importlib.import_module(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield load
