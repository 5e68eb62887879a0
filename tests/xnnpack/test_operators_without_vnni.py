# SPDX-License-Identifier: Apache-2.0
"""The tests of the operators again without VNNI, where oneDNN saturates silently."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from tests.processes import python

ROOT = Path(__file__).parents[2]
HAS_VNNI = platform.machine() in {"x86_64", "AMD64"} and torch.cpu._is_vnni_supported()
needs_vnni = pytest.mark.skipif(
    not HAS_VNNI, reason="this processor has no VNNI to take away: the other tests ran without it"
)


def run(*command: str) -> str:
    """Run Python without VNNI: the setting is read when torch is loaded, hence the process."""
    return python(*command, cwd=ROOT, ONEDNN_MAX_CPU_ISA="AVX2")


@needs_vnni
def test_the_setting_takes_the_instructions_away() -> None:
    probe = "from qompose_xnnpack.operators import integer_matmul; print(integer_matmul.int_mm_is_exact())"
    assert run("-c", probe).strip() == "False"


@needs_vnni
@pytest.mark.full
def test_the_operators_are_the_same() -> None:
    tests = Path(__file__).with_name("operators")
    assert "passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
