# SPDX-License-Identifier: Apache-2.0
"""The tests of the operators again on a processor without VNNI, where oneDNN saturates silently."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from qompose_xnnpack.operators import integer_matmul

ROOT = Path(__file__).parents[2]
# Read when torch is loaded, hence the processes.
ENVIRONMENT = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_operators_are_the_same() -> None:
    tests = Path(__file__).with_name("operators")
    assert "passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))


def test_the_setting_takes_the_instructions_away() -> None:
    """Else the test above would run what the others did, as it does where there are none to take."""
    probe = "from qompose_xnnpack.operators import integer_matmul; print(integer_matmul.int_mm_is_exact())"
    exact = run("-c", probe).strip()
    had = platform.machine() in {"x86_64", "AMD64"} and torch.cpu._is_vnni_supported()
    assert exact == str(False if had else integer_matmul.int_mm_is_exact())
