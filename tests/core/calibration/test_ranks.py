# SPDX-License-Identifier: Apache-2.0
"""Processes that calibrate together: what one gives, bit by bit; and no waiting for one that is gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import qompose

from tests.core.calibration.test_collecting import KINDS, prepared, quantizer
from tests.core.toy import randn
from tests.processes import END_AT_ONCE

ROOT = Path(__file__).parents[3]

SCRIPT = """
import datetime, json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, qompose
from tests.core.calibration.test_collecting import HISTOGRAM, KINDS, config, prepared, quantizer
from tests.core.toy import randn
from qompose.observers import MovingAverageMinMaxObserver

out, count, children = sys.argv[1], int(os.environ["WORLD_SIZE"]), []
for rank in range(count):
    children.append(os.fork())
    if not children[-1]:
        break
else:
    ends = [os.waitpid(child, 0)[1] for child in children]
    print(json.dumps([os.waitstatus_to_exitcode(end) for end in ends]), flush=True)
    os._exit(0)
os.environ["RANK"] = str(rank)
for stream, name in ((1, "printed"), (2, "errors")):
    os.dup2(os.open(f"{out}/{rank}.{name}", os.O_CREAT | os.O_WRONLY), stream)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
batches = [randn(3, 6, seed=s) * (1 + s % 5) for s in range(11)]
"""


def together(path: Path, body: str, count: int = 4) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in processes of a group, as torchrun does, and return how each ended.

    They are forks of one that has imported torch and the tests, which takes seconds.
    """
    script = path / "script.py"
    script.write_text(SCRIPT + body + END_AT_ONCE)
    variables = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(script), str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return [
        subprocess.CompletedProcess(
            command,
            end,
            (path / f"{rank}.printed").read_text("utf-8"),
            (path / f"{rank}.errors").read_text("utf-8"),
        )
        for rank, end in enumerate(json.loads(done.stdout))
    ]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# The others tell one that hangs that they are through, so that the test need not wait for longer.
HANGS = "while len(list(Path(out).glob('*.through'))) < 2: time.sleep(0.1)"
BODY = """
def refusal(model, data, **options):
    try:
        qompose.calibrate(model, data, **options)
    except qompose.errors.CalibrationError as error:
        return str(error)

def without_one():
    for number, batch in enumerate(batches):
        if rank == 2 and number == 6:
            END
        yield batch

for kind, chosen in KINDS.items():
    for name, data, options in (
        ("", batches, {}),
        ("sharded", batches[rank::count], {"sharded": True}),
        ("limit", iter(batches), {"limit": 9}),
    ):
        if name == "sharded" or kind == "histogram":
            model = qompose.calibrate(prepared(quantizer(chosen)), data, **options)
            qompose.statistics(model).save(f"{out}/{kind}.{name}.{rank}.json")

moving = prepared(quantizer(config(MovingAverageMinMaxObserver)))
told = {"order": refusal(moving, iter(()))}
told["batch"] = refusal(prepared(), [*batches[:5], randn(3, 5), *batches[6:]])
told["twice"] = refusal(model, batches)
print(json.dumps(told), flush=True)
if refusal(prepared(), without_one(), timeout=10):
    Path(out, f"{rank}.through").touch()
    os._exit(7)
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("os._exit(3)", id="dies"),
        pytest.param(HANGS, id="hangs", marks=pytest.mark.full),
    ],
)
def test_three_processes_give_what_one_gives_and_fail_together(tmp_path: Path, end: str) -> None:
    """Where a batch fails in one, where observers need an order, and where one of them is gone."""
    done = together(tmp_path, BODY.replace("END", end), count=3)
    assert [process.returncode for process in done[:2]] == [7, 7], done[0].stderr
    batches = [randn(3, 6, seed=s) * (1 + s % 5) for s in range(11)]
    written = sorted(tmp_path.glob("*.*.?.json"))
    assert len(written) == 3 * (len(KINDS) + 2)
    for path in written:
        kind, name, _ = path.stem.split(".")
        own = batches[:9] if name == "limit" else batches
        alone = qompose.calibrate(prepared(quantizer(KINDS[kind])), own)
        qompose.statistics(alone).save(tmp_path / "alone.json")
        assert path.read_bytes() == (tmp_path / "alone.json").read_bytes(), path.name
    told = [json.loads(process.stdout) for process in done]
    assert all("MovingAverageMinMaxObserver" in words["order"] for words in told)
    assert all(words["twice"] for words in told), "each would add what the others have too"
    assert "calibration batch 6 " in told[2]["batch"]
    assert all("rank 2: BatchError" in words["batch"] for words in told[:2])
