# SPDX-License-Identifier: Apache-2.0
"""What tests of compiled programs share."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import qompose_x86_inductor
import torch
from qompose_x86_inductor.native import code, processor
from qompose_x86_inductor.native.processor import Isa

NATIVE = Path(qompose_x86_inductor.__file__).with_name("native")
ENTRY = Path(__file__).with_name("native_entry.cpp")


def sets_of_this_machine() -> list[Any]:
    """Return the instruction sets that tests of the C++ can run: this machine's, and in `full` lower ones."""
    here = processor.of_machine()
    if here is None:
        skipped = pytest.mark.skip(reason="the C++ is not for this processor")
        return [pytest.param(processor.AVX2, marks=skipped)]
    lower = [] if here is processor.AVX2 else [processor.AVX2]
    if here is processor.AVX512_VNNI:
        lower.append(processor.AVX512)
    return [here, *(pytest.param(isa, marks=pytest.mark.full) for isa in lower)]


@pytest.fixture(scope="session", params=sets_of_this_machine(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    """Return an instruction set."""
    found: Isa = request.param
    return found


@pytest.fixture(scope="session")
def library_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Isa], ctypes.CDLL]:
    """Return what compiles the C++ for a set, once."""
    folder = tmp_path_factory.mktemp("native")
    return functools.cache(lambda isa: _compiled(isa, folder))


@pytest.fixture(scope="session")
def library(isa: Isa, library_for: Callable[[Isa], ctypes.CDLL]) -> ctypes.CDLL:
    """Return the C++ compiled for `isa`."""
    return library_for(isa)


def _compiled(isa: Isa, folder: Path) -> ctypes.CDLL:
    """Compile the C++ as torch compiles it into programs."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # -Bsymbolic: its `operator new` is that of the file.
    flags = [f"-I{NATIVE}", "-Wl,-Bsymbolic", f"-D{code.macro(isa)}"]
    options = CppTorchOptions(
        pick_vec_isa(), include_pytorch=True, aot_mode=True, extra_flags=flags
    )
    builder = CppBuilder(f"kernels_{isa.name}", str(ENTRY), options, str(folder))
    builder.build()
    return ctypes.CDLL(builder.get_target_file_path())


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as on a processor that our C++ is not for."""
    monkeypatch.setattr(processor, "isa", lambda: None)


@pytest.fixture
def nothing_is_kept() -> Iterator[None]:
    """What torch compiled for a test goes with it."""
    yield
    torch._dynamo.reset()
