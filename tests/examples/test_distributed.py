# SPDX-License-Identifier: Apache-2.0
"""The example of several processes writes, bit by bit, the file that one process writes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import python

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed_calibration.py"


@pytest.mark.full
def test_torchrun_gives_what_one_process_gives(tmp_path: Path) -> None:
    for package in ("sklearn", "qompose_xnnpack"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    launchers = {
        "one": [],
        "three": ["-m", "torch.distributed.run", "--standalone",
                  "--nproc-per-node", "3"],
    }  # fmt: skip
    for name, launcher in launchers.items():
        python(*launcher, SCRIPT, f"{name}.safetensors", cwd=tmp_path)
    one, three = ((tmp_path / f"{name}.safetensors").read_bytes() for name in launchers)
    assert one == three
