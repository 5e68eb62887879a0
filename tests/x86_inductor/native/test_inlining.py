# SPDX-License-Identifier: Apache-2.0
"""Kernels call no small functions where they are compiled as a package is, with -O1."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
from qompose_x86_inductor.native import code, processor
from torch.utils.cpp_extension import include_paths

SHIMS: Final = "shims.h"
SMALL: Final = [
    ("native_product", SHIMS, ("pixels", "runs", "quads", "read_bytes")),
    ("native_depthwise", SHIMS, ("pixels", "bytes")),
    ("native_lstm", SHIMS, ("whole_vectors", "row_at", "blocks", "place")),
    ("native_float_attention", SHIMS, ("offset", "rounded_up", "rows_within", "vectors_at")),
    ("native_cache_attention", SHIMS, ("offset", "rounded_up", "rows_within")),
    ("native_attention", SHIMS, ("offset", "rounded_up", "rows_within")),
    (
        "linear_packed",
        "packed_linear_shim.h",
        ("weight_at", "unit_bytes", "panels", "load_lanes", "scale_of", "nibble"),
    ),
]
"""Operators, the headers that hold them, and functions that their kernels call at every turn."""


def symbols(operator: str, header: str, folder: Path) -> bytes:
    """What GCC makes of an operator and all that it calls; names of functions are behind their lengths."""
    isa = processor.of_machine() if header == SHIMS else None
    source, made = folder / "kernel.cpp", folder / "kernel.o"
    used = f"void* used = reinterpret_cast<void*>(&aoti_torch_cpu_{operator});\n"
    source.write_text(f"{code.included(header, isa)}\n{used}", "utf-8")
    options = ["-std=c++20", "-O1", "-march=native", "-fPIC", "-fopenmp", "-c"]
    folders = [f"-I{each}" for each in include_paths()]
    subprocess.run(["g++", *options, *folders, source, "-o", made], check=True)
    return made.read_bytes()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no GCC")
@pytest.mark.parametrize(("operator", "header", "small"), SMALL)
def test_small_functions(
    operator: str, header: str, small: tuple[str, ...], tmp_path: Path
) -> None:
    isa = processor.of_machine()
    if header == SHIMS and isa is None:
        pytest.skip("the C++ is not for this processor")
    if operator == "native_attention" and isa is not processor.AVX512_VNNI:
        pytest.skip("no AVX-512 VNNI")
    found = symbols(operator, header, tmp_path)
    assert f"aoti_torch_cpu_{operator}".encode() in found
    assert [name for name in small if f"{len(name)}{name}E".encode() in found] == []
