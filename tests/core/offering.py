# SPDX-License-Identifier: Apache-2.0
"""A backend as an installed distribution offers it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import qompose
from importlib_metadata import EntryPoint
from qompose.backend import Backend, discovery


@contextlib.contextmanager
def offered_by_a_package(make: Callable[[], Backend]) -> Iterator[None]:
    """Let `toy-package` offer a backend, and no other package one."""
    module: Any = ModuleType("fake_toy")
    module.qompose_backend = qompose.backend.hookimpl(lambda: make(), specname="qompose_backend")
    point = EntryPoint("toy", "fake_toy", "qompose")
    vars(point).update(dist=SimpleNamespace(name="toy-package", version="1.2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fake_toy", module)
        patch.delenv("QOMPOSE_PLUGINS", raising=False)
        patch.setattr(discovery, "entry_points", lambda group: [point] * (group == discovery.GROUP))
        discovery._load.cache_clear()
        yield
    discovery._load.cache_clear()
