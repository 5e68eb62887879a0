# SPDX-License-Identifier: Apache-2.0
"""What tests of compiled programs share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import qompose_x86_inductor
import torch
from qompose_x86_inductor.native import vnni

NATIVE = Path(qompose_x86_inductor.__file__).with_name("native")
ENTRY = Path(__file__).with_name("native_entry.cpp")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the C++ once, as torch compiles it into programs."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    flags = [f"-I{NATIVE}", "-Wl,-Bsymbolic"]  # the latter: its `operator new` is that of the file
    options = CppTorchOptions(
        pick_vec_isa(), include_pytorch=True, aot_mode=True, extra_flags=flags
    )
    folder = tmp_path_factory.mktemp("native")
    builder = CppBuilder("kernels", str(ENTRY), options, str(folder))
    builder.build()
    return ctypes.CDLL(builder.get_target_file_path())


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as on a processor that our C++ is not for."""
    monkeypatch.setattr(vnni, "available", lambda: False)


@pytest.fixture
def nothing_is_kept() -> Iterator[None]:
    """What torch compiled for a test goes with it."""
    yield
    torch._dynamo.reset()
