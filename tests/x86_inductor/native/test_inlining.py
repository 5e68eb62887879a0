# SPDX-License-Identifier: Apache-2.0
"""Kernels call no small functions where they are compiled as a package is, with -O1."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from qompose_x86_inductor.native import code, processor
from torch.utils.cpp_extension import include_paths

SMALL: Final = {
    "native_product": ("pixels", "runs", "quads", "read_bytes"),
    "native_depthwise": ("pixels", "bytes"),
    "native_lstm": ("whole_vectors", "row_at", "blocks", "place"),
    "native_float_attention": ("offset", "rounded_up", "rows_within", "vectors_at"),
    "native_cache_attention": ("offset", "rounded_up", "rows_within"),
    "native_attention": ("offset", "rounded_up", "rows_within"),
}
"""Operators, and functions that their kernels call at every turn."""
PACKED: Final = {
    "linear_packed": ("weight_at", "unit_bytes", "panels", "load_lanes", "scale_of", "nibble")
}


def symbols(
    operators: Iterable[str], header: str, isa: processor.Isa | None, folder: Path
) -> bytes:
    """What GCC makes of operators and all that they call; names of functions are behind their lengths."""
    source, made = folder / "kernel.cpp", folder / "kernel.o"
    used = (f"void* used_{o} = reinterpret_cast<void*>(&aoti_torch_cpu_{o});" for o in operators)
    source.write_text("\n".join([code.included(header, isa), *used, ""]), "utf-8")
    options = ["-std=c++20", "-O1", "-march=native", "-fPIC", "-fopenmp", "-c"]
    folders = [f"-I{each}" for each in include_paths()]
    subprocess.run(["g++", *options, *folders, source, "-o", made], check=True)
    return made.read_bytes()


def assert_inlined(small: Mapping[str, Sequence[str]], found: bytes) -> None:
    for operator, names in small.items():
        assert f"aoti_torch_cpu_{operator}".encode() in found
        assert [name for name in names if f"{len(name)}{name}E".encode() in found] == []
    assert b"initializer_listIfE" not in found


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no GCC")


def test_products_by_packed_weights(tmp_path: Path) -> None:
    assert_inlined(PACKED, symbols(PACKED, "packed_linear_shim.h", None, tmp_path))


@pytest.mark.full  # GCC takes ten seconds
def test_all_other_kernels(tmp_path: Path) -> None:
    isa = processor.of_machine()
    if isa is not processor.AVX512_VNNI:
        pytest.skip("no AVX-512 VNNI")
    assert_inlined(SMALL, symbols(SMALL, "shims.h", isa, tmp_path))
