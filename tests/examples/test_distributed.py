# SPDX-License-Identifier: Apache-2.0
"""The example of several processes writes, bit by bit, the file that one process writes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed_calibration.py"


@pytest.mark.full
def test_torchrun_gives_what_one_process_gives(tmp_path: Path) -> None:
    for package in ("sklearn", "qompose_xnnpack"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    launchers = {
        "one": [sys.executable],
        "three": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                  "--nproc-per-node", "3"],
    }  # fmt: skip
    for name, launcher in launchers.items():
        done = subprocess.run(
            [*launcher, str(SCRIPT), f"{name}.safetensors"],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, three = ((tmp_path / f"{name}.safetensors").read_bytes() for name in launchers)
    assert one == three
