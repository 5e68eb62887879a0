# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/zoo.py`: a kill loses nothing, and what crashes, hangs, grows or answers wrongly is a row."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import qompose
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

MODELS = """
import os, pathlib, signal, time
from dataclasses import replace
from torch import nn
from tests.zoo.entry import floats, zoo_model

def model(name):
    return zoo_model(name, lambda: nn.Linear(8, 4), floats(2, 8))

def waits():
    while not pathlib.Path(__file__).with_suffix(".go").exists():
        time.sleep(0.05)
    return nn.Linear(8, 4)

def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

def raises():
    raise ArithmeticError("no such layer")

ZOO = [
    model("first"),
    replace(model("waits"), build=waits),
    replace(model("crashes"), build=crashes),
    replace(model("raises"), build=raises),
    model("last"),
]
"""


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def lines(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


def started(command: list[str], state: Path) -> subprocess.Popen[bytes]:
    """The benchmark, once it has two rows and is at a model that never ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(lines(state)) < 2 and process.poll() is None:
        time.sleep(0.05)
    return process


def test_a_kill_loses_nothing_and_a_model_that_crashes_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo, state, found = (tmp_path / name for name in ("few.py", "state.jsonl", "rows.json"))
    zoo.write_text(MODELS)
    options = ["--zoo", str(zoo), "--state", str(state), "--backends", "xnnpack", "--first",
               "--schemes", "dynamic", "--targets", "torch", "--json", str(found)]  # fmt: skip
    process = started([sys.executable, str(BENCHMARKS / "zoo.py"), *options], state)
    assert process.poll() is None, process.stderr and process.stderr.read().decode()
    process.kill()
    process.communicate()
    before = lines(state)
    assert [row["works"] for row in before] == [True, True]
    with state.open("a") as file:
        file.write('{"model": "wai')  # killed as it wrote

    zoo.with_suffix(".go").touch()
    main = module("zoo", monkeypatch).main
    assert main(options) == 1
    printed = capsys.readouterr().out
    rows = {(row["model"], row["flow"]): row for row in json.loads(found.read_text())["rows"]}
    assert lines(state)[:2] == before == list(rows.values())[:2]
    assert len(rows) == len(lines(state)) == 10
    works = {name for (name, _), row in rows.items() if row["works"]}
    assert works == {"first", "waits", "last"}
    flow = "xnnpack dynamic per-channel, torch"
    assert rows["last", flow]["coverage"] == 1.0
    assert rows["last", flow]["sqnr"] > 25
    assert "SIGSEGV" in rows["crashes", flow]["error"]
    assert rows["crashes", flow]["stage"] == rows["raises", flow]["stage"] == "build"
    assert rows["raises", "export"]["error"] == "ArithmeticError: no such layer"
    assert rows["raises", flow]["error"] == "as without any flow: ArithmeticError: no such layer"
    assert f"| {flow} | 5 | 3 of 5, 60.0% | 3 of 3, 100.0% |" in printed
    assert main([*options, "--models", "first", "last"]) == 0  # nothing is left to do
    assert len(lines(state)) == 10


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("zoo_workers", monkeypatch)


def answer(
    workers: ModuleType, script: str, seconds: float = 60, mib: int = 4096
) -> dict[str, Any]:
    """What a process that runs a script is told to have done."""
    start = "import json, os, sys, time\nsys.stdin.readline()\n"
    start += 'print(json.dumps({"stage": "lower"}), flush=True)\n'
    command = [sys.executable, "-c", start + script]
    worker = workers.Worker(command, workers.Limits(seconds, mib << 20))
    try:
        row: dict[str, Any] = worker.run("model", workers.Flow())
    finally:
        worker.close()
    return row


class TestWorkers:
    def test_a_row(self, workers: ModuleType) -> None:
        assert answer(workers, 'print(json.dumps({"row": {"works": True}}), flush=True)') == {
            "works": True
        }

    def test_a_hang(self, workers: ModuleType) -> None:
        row = answer(workers, "time.sleep(600)", seconds=0.3)
        assert (row["works"], row["stage"], row["error"]) == (
            False,
            "lower",
            "it took more than 0.3 s",
        )

    def test_an_exit_with_its_last_words(self, workers: ModuleType) -> None:
        row = answer(workers, "print('no kernel', file=sys.stderr)\nos._exit(3)")
        assert row["error"] == "its process ended with 3: no kernel"

    @pytest.mark.skipif(
        not Path("/proc/self/statm").exists(), reason="memory is known on Linux alone"
    )
    def test_growth(self, workers: ModuleType) -> None:
        row = answer(workers, "held = b'x' * (200 << 20)\ntime.sleep(600)", mib=100)
        assert row["error"].startswith("it held ") and row["error"].endswith(
            "MiB of the 100 allowed"
        )

    def test_a_process_ends_with_its_parent(self, tmp_path: Path) -> None:
        """Even out of a run that hangs: nothing would end it else."""
        script = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from zoo_workers import end_with
if os.fork():
    time.sleep(600)
import threading
threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
        parent = subprocess.Popen([sys.executable, "-c", script])
        child = tmp_path / "pid"
        while not child.exists() or not child.read_text():
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        for _ in range(200):
            if not alive(int(child.read_text())):
                return
            time.sleep(0.05)
        raise AssertionError("it goes on")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class TestState:
    """Rows of other sources are no rows of these, unless that is asked for."""

    def test_other_sources_are_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        states = module("zoo_state", monkeypatch)
        path = tmp_path / "state.jsonl"
        state = states.State(path)
        state.add("mlp", "export", {"works": True})
        state.close()
        old = path.read_text()
        path.write_text(old.replace(state.on["sources"], "0" * 16))
        with pytest.raises(
            states.ChangedError, match=rf"sources: 0+ then, {state.on['sources']} now.*--restart"
        ):
            states.State(path)
        mixed = states.State(path, mixed=True)
        assert mixed.has("mlp", "export", "") and not mixed.has("mlp", "export", "changed")
        with pytest.raises(BlockingIOError):
            states.State(path, mixed=True)
        mixed.close()
        anew = states.State(path, restart=True)
        assert not anew.rows and not path.read_text()
        anew.close()

    def test_failed_rows_can_be_measured_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = module("zoo_state", monkeypatch).State(tmp_path / "state.jsonl")
        state.add("mlp", "export", {"works": False})
        assert state.has("mlp", "export", "") and not state.has("mlp", "export", "failed")
        state.add("mlp", "export", {"works": True})
        assert state.has("mlp", "export", "failed")
        state.close()


def test_flows_are_all_that_capabilities_name(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = module("zoo_flows", monkeypatch)
    found = [flow for flow in flows.flows(flows.usable()[0]) if not flow.dynamic]
    rows = [
        row
        for b in qompose.backends()
        for row in flows.load_backend(b.name).quantization_capabilities()
    ]
    named = {(row.backend, row.config, target) for row in rows for target in row.targets}
    alone = {(*flow.members[0], flow.target) for flow in found if len(flow.members) == 1}
    assert alone == {one for one in named if one[0] != "embedding" or one[2] == "torch"}
    assert {flow.backend for flow in found if len(flow.members) > 1} == {
        "embedding + x86_inductor", "embedding + xnnpack",
    }  # fmt: skip
    assert len({flow.name for flow in found}) == len(found)
    assert all(
        flow == flows.Flow.from_dict(json.loads(json.dumps(flow.to_dict()))) for flow in found
    )


class TestComparing:
    """A result of another structure, shape or type is none, and the worst output counts."""

    X = torch.tensor([1.0, 2.0])

    def test_the_worst_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = module("zoo_run", monkeypatch)
        found = run.compared(
            [(self.X, self.X, torch.arange(4))],
            [(self.X, self.X * 1.1, torch.tensor([0, 1, 2, 9]))],
        )
        assert found["outputs"] == [run.EQUAL, 20.0] and found["same"] == 0.75
        assert found["sqnr"] == pytest.approx(20.0, abs=1e-3)

    @pytest.mark.parametrize(
        "wrong, why",
        [
            ((X, X), "another structure"),
            (X[:1], "float32 \\(1,\\)"),
            (X.double(), "float64"),
            (X / torch.tensor([1.0, 0.0]), "not finite"),
        ],
        ids=["structure", "shape", "type", "infinite"],
    )
    def test_wrong(self, wrong: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        run = module("zoo_run", monkeypatch)
        with pytest.raises(run.WrongOutputError, match=why):
            run.compared([self.X], [wrong])


def test_rounding_to_eight_bits_costs_a_linear_layer_what_it_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 steps over 4 standard deviations to either side are 41 dB; input, weight and output cost."""
    rounded = module("zoo_yardstick", monkeypatch)
    torch.manual_seed(0)
    linear, batches = torch.nn.Linear(64, 64), [(torch.randn(256, 64),) for _ in range(2)]
    program = torch.export.export(linear, batches[0]).module()
    (result,) = rounded.rounded_outputs(program, batches[:1], batches[1:])
    with torch.no_grad():
        wanted = linear(*batches[1])
    noise = float((wanted - result).square().sum() / wanted.square().sum())
    assert 1e-5 < noise < 3e-4
