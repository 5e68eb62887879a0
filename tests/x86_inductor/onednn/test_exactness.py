# SPDX-License-Identifier: Apache-2.0
"""Whether int8 is exact here, and that results do not depend on the answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from qompose_x86_inductor.onednn import exactness, packed_weights
from torch._subclasses.fake_tensor import FakeTensorMode

LIMIT = "ONEDNN_MAX_CPU_ISA"
HERE = Path(__file__).parent.parent
needs_vnni = pytest.mark.skipif(
    not exactness.vnni_exact(),
    reason="there is no VNNI to take away: the other tests ran without it",
)


def _run(*command: str, limit: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, LIMIT: limit}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def test_the_answer_agrees_with_itself() -> None:
    exact = exactness.vnni_exact()
    assert (exactness.reason() == "") == exact
    assert exactness.recommended_weight_range() == ((-128, 127) if exact else (-64, 63))


def test_the_recommended_range_is_admitted_and_packed() -> None:
    low, high = exactness.recommended_weight_range()
    weight = torch.tensor([[low, high, 0, 0]], dtype=torch.int8)
    assert exactness.admits(weight)
    assert packed_weights.linear(weight).weight is not None


def test_weights_beyond_the_exact_range_are_not_packed() -> None:
    weight = torch.full((1, 4), 127, dtype=torch.int8)
    assert (packed_weights.linear(weight).weight is not None) == exactness.vnni_exact()


def test_probing_is_blind_to_fake_tensors_and_default_devices() -> None:
    with torch.device("meta"), FakeTensorMode():
        found = exactness._arithmetic.__wrapped__()
    assert found == exactness._arithmetic()


@needs_vnni
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE"])
def test_older_instructions_are_found_to_saturate(limit: str) -> None:
    done = _run(
        "-c",
        "from qompose_x86_inductor.onednn import exactness as e; print(e.vnni_exact(), e.reason())",
        limit=limit,
    )
    assert done.stdout.startswith("False "), done.stderr


@needs_vnni
@pytest.mark.full
def test_everything_again_without_vnni() -> None:
    names = ("onednn", "operators", "rules/test_static.py")
    files = [str(HERE / name) for name in names]
    done = _run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, limit="AVX2")
    assert done.returncode == 0, done.stdout[-4000:]
