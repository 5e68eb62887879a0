# SPDX-License-Identifier: Apache-2.0
"""Kernels call no small functions where they are compiled as a package is, with -O1."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from qompose_x86_inductor.native import code

FUNCTION = """#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>
#pragma GCC push_options
#pragma GCC optimize("O3")
{included}
#pragma GCC pop_options
void called(const qompose_x86::packed::Linear& linear, const float* x) {{
  qompose_x86::packed::compute(linear, x, linear.depth, 1);
}}
"""
SMALL = ("load_lanes", "scale_of", "nibble", "madd", "to_floats")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no GCC")
def test_packed_linear(tmp_path: Path) -> None:
    source, made = tmp_path / "linear.cpp", tmp_path / "linear.o"
    source.write_text(FUNCTION.format(included=code.included("packed_linear.h")), "utf-8")
    options = ["-std=c++20", "-O1", "-march=native", "-fPIC", "-fopenmp", "-c"]
    subprocess.run(["g++", *options, source, "-o", made], check=True)
    names = made.read_bytes()
    assert b"many_rows" in names
    assert [name for name in SMALL if name.encode() in names] == []
