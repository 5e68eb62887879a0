# SPDX-License-Identifier: Apache-2.0
"""Processes that calibrate together: what one gives, bit by bit; and no waiting for one that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import datetime, json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, qompose
from tests.core.calibration.test_collecting import HISTOGRAM, KINDS, config, prepared, quantizer
from tests.core.toy import randn
from qompose.observers import MovingAverageMinMaxObserver

rank, count, out = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
batches = [randn(3, 6, seed=s) * (1 + s % 5) for s in range(11)]
"""


def together(path: Path, body: str, count: int = 4) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in processes of a group, as torchrun does, and return how each ended."""
    script = path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    port = _free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(count)
    ]  # fmt: skip
    ends = [(process, *process.communicate(timeout=240)) for process in started]
    return [subprocess.CompletedProcess(p.args, p.returncode, out, err) for p, out, err in ends]


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_four_processes_give_what_one_gives(tmp_path: Path) -> None:
    done = together(
        tmp_path,
        """
        for kind, chosen in KINDS.items():
            model = qompose.calibrate(prepared(quantizer(chosen)), batches)
            qompose.statistics(model).save(f"{out}/{kind}.{rank}.json")
            own = batches[rank::count]
            model = qompose.calibrate(prepared(quantizer(chosen)), own, sharded=True)
            qompose.statistics(model).save(f"{out}/{kind}.{rank}.sharded.json")
            model = qompose.calibrate(prepared(quantizer(chosen)), iter(batches), limit=9)
            qompose.statistics(model).save(f"{out}/{kind}.{rank}.limit.json")
        dist.destroy_process_group()
        """,
    )
    assert [d.returncode for d in done] == [0] * 4, done[0].stderr
    import qompose

    from tests.core.calibration.test_collecting import KINDS, prepared, quantizer
    from tests.core.toy import randn

    batches = [randn(3, 6, seed=s) * (1 + s % 5) for s in range(11)]
    for kind, chosen in KINDS.items():
        for name, wanted in (("", batches), (".sharded", batches), (".limit", batches[:9])):
            alone = qompose.calibrate(prepared(quantizer(chosen)), wanted)
            qompose.statistics(alone).save(tmp_path / "alone.json")
            expected = (tmp_path / "alone.json").read_bytes()
            for rank in range(4):
                assert (tmp_path / f"{kind}.{rank}{name}.json").read_bytes() == expected


# The others tell one that hangs that they are through, so that the test need not wait for longer.
HANGS = "while len(list(Path(out).glob('*.through'))) < 3: time.sleep(0.1)"


@pytest.mark.parametrize("end", ["os._exit(3)", HANGS], ids=["dies", "hangs"])
def test_a_rank_that_is_gone_is_an_error_within_the_timeout(tmp_path: Path, end: str) -> None:
    start = time.monotonic()
    done = together(
        tmp_path,
        f"""
        def loaded():
            for number, batch in enumerate(batches):
                if rank == 2 and number == 6:
                    {end}
                yield batch
        try:
            qompose.calibrate(prepared(), loaded(), timeout=10)
        except qompose.errors.CalibrationError as error:
            print(error, flush=True)
            Path(out, str(rank) + ".through").touch()
            os._exit(7)
        """,
    )
    codes = [d.returncode for d in done]
    assert [code for rank, code in enumerate(codes) if rank != 2] == [7, 7, 7], done[0].stderr
    assert "died, or did not answer within 10 seconds" in done[0].stdout
    assert time.monotonic() - start < 200


def test_a_batch_that_fails_in_one_process_fails_in_all(tmp_path: Path) -> None:
    done = together(
        tmp_path,
        """
        batches[6] = randn(3, 5)
        try:
            qompose.calibrate(prepared(), batches)
        except qompose.errors.CalibrationError as error:
            print(error, flush=True)
            os._exit(7)
        """,
    )
    assert [d.returncode for d in done] == [7] * 4, done[0].stderr
    assert "calibration batch 7 does not fit the model" in done[2].stdout
    for rank in (0, 1, 3):
        assert "another process failed: rank 2: BatchError" in done[rank].stdout


def test_what_depends_on_the_order_is_refused_before_any_batch(tmp_path: Path) -> None:
    done = together(
        tmp_path,
        """
        model = prepared(quantizer(config(MovingAverageMinMaxObserver)))
        try:
            qompose.calibrate(model, iter(()))
        except qompose.errors.CalibrationError as error:
            print(error, flush=True)
        dist.destroy_process_group()
        """,
        count=2,
    )
    assert [d.returncode for d in done] == [0, 0], done[0].stderr
    assert "MovingAverageMinMaxObserver" in done[0].stdout
