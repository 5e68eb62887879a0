# SPDX-License-Identifier: Apache-2.0
"""The installed command as a user runs it: processes, files and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim

from tests.pages import blocks
from tests.reader import matches

COMMAND = Path(sys.executable).with_name("qompose")


class Tagger(nn.Module):
    """A table, two linear layers and an argument that is passed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.hidden = nn.Linear(16, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, ids: Tensor, *, weight: Tensor) -> Tensor:
        return self.out((self.hidden(self.table(ids)) * weight).relu())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs and data for them."""
    folder = tmp_path_factory.mktemp("work")
    torch.manual_seed(0)
    batch = Dim("batch", min=2, max=32)
    program = torch.export.export(
        Tagger().eval(),
        (torch.randint(50, (4, 6)),),
        {"weight": torch.rand(4, 6, 1)},
        dynamic_shapes={"ids": {0: batch}, "weight": {0: batch}},
    )
    torch.export.save(program, folder / "tagger.pt2")
    data = {"ids": torch.randint(50, (22, 6)), "weight": torch.rand(22, 6, 1)}
    save_file(data, folder / "tagger.safetensors")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(4, 8),)), folder / "mlp.pt2")
    torch.save([torch.randn(4, 8) for _ in range(3)], folder / "mlp.pt")
    return folder


def variables(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("QOMPOSE")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run(
    folder: Path, *arguments: str, code: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(COMMAND), *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env=variables(**more),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def test_from_an_exported_program_to_int8_kernels_and_back(folder: Path) -> None:
    """Quantize in one process, report in another, lower in a third."""
    done = run(
        folder, "quantize", "tagger.pt2", "--backend", "embedding", "--backend", "xnnpack",
        "--calibration", "tagger.safetensors", "--json", "--strict",
    )  # fmt: skip
    lowered = json.loads(done.stdout)
    owners = {row["owner"] for row in lowered["rows"] if row["state"] == "int8 kernel"}
    assert owners == {"embedding", "xnnpack"}
    assert "qompose: wrote tagger.qompose (" in done.stderr
    assert "\r" not in done.stderr  # no progress bar: it is no terminal

    text = run(folder, "report", "tagger.qompose", QOMPOSE_PLUGINS="").stdout
    assert "embedding" in text
    assert "simulated (Q/DQ)" in text

    program = torch.export.load(folder / "tagger.pt2").module()
    model = qompose.lower(qompose.load(folder / "tagger.qompose"))
    data = load_file(folder / "tagger.safetensors")
    ids, weight = data["ids"][:3], data["weight"][:3]
    with torch.no_grad():
        error = model(ids, weight=weight) - program(ids, weight=weight)
    assert error.abs().max() < 0.05


def test_pages(folder: Path) -> None:
    """Of what runs, beside what is saved, and of a saved model."""
    done = run(
        folder, "quantize", "mlp.pt2", "--backend", "xnnpack", "--calibration", "mlp.pt",
        "--output", "paged.qompose", "--html", "lowered.html", "--json",
    )  # fmt: skip
    assert "qompose: wrote lowered.html (" in done.stderr
    lowered = (folder / "lowered.html").read_text("utf-8")
    assert lowered == as_page(json.loads(done.stdout), folder / "expected.html")
    done = run(folder, "report", "paged.qompose", "--html", "saved.html", "--json")
    assert "qompose: wrote saved.html (" in done.stderr
    saved = (folder / "saved.html").read_text("utf-8")
    assert saved == as_page(json.loads(done.stdout), folder / "expected.html") != lowered


def as_page(data: Any, file: Path) -> str:
    qompose.Report.from_dict(data).save(file)
    return file.read_text("utf-8")


def test_pages_that_cannot_be(folder: Path) -> None:
    """Said before anything is written."""
    arguments = ("quantize", "mlp.pt2", "--backend", "xnnpack", "--calibration", "mlp.pt")
    saved = ("--output", "never.qompose")
    for page, message in {
        "never.json": "must name a file that ends in .html",
        "nowhere/never.html": "nowhere is not a directory",
    }.items():
        done = run(folder, *arguments, *saved, "--html", page, code=1)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = run(folder, *arguments, "--output", "a.html", "--html", "a.html", code=1)
    assert "a.html is given for two files" in done.stderr
    assert not [*folder.glob("never*"), *folder.glob("a.html")]


def test_to_a_program_file_of_another_runtime(folder: Path) -> None:
    executorch = pytest.importorskip("qompose_xnnpack.executorch_target.executorch_imports")
    done = run(
        folder, "quantize", "mlp.pt2", "--backend", "xnnpack", "--calibration", "mlp.pt",
        "--target", "executorch", "--output", "mlp.qompose", "--lowered", "mlp.pte", "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["target"] == "executorch"
    x = torch.load(folder / "mlp.pt")[0]
    with executorch.quiet():
        runtime = executorch.import_runtime()
        method = runtime.load_program((folder / "mlp.pte").read_bytes()).load_method("forward")
        (y,) = method.execute([x])
    assert torch.allclose(y, qompose.load(folder / "mlp.qompose")(x), atol=0.02)


def test_a_configuration_in_a_file(folder: Path) -> None:
    quantizer = qompose.compose("xnnpack")
    (folder / "quantizer.json").write_text(json.dumps(quantizer.to_dict()))
    arguments = ("--calibration", "mlp.pt", "--output", "other.qompose", "--markdown")
    done = run(folder, "quantize", "mlp.pt2", "--config", "quantizer.json", *arguments)
    assert "| xnnpack | int8 kernel |" in done.stdout


def test_missing_calibration(folder: Path) -> None:
    """One message, no traceback, no file."""
    before = sorted(folder.iterdir())
    done = run(folder, "quantize", "mlp.pt2", "--backend", "xnnpack", "-h")
    assert "--calibration" in done.stdout
    arguments = ("--backend", "xnnpack", "--output", "never.qompose")
    done = run(folder, "quantize", "mlp.pt2", *arguments, code=1)
    assert done.stdout == ""
    assert "tensors are quantized statically" in done.stderr
    assert "--calibration FILE" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(folder.iterdir()) == before


def test_a_trace_leaves_json_as_it_is(folder: Path) -> None:
    done = run(folder, "capabilities", "embedding", "--json", QOMPOSE_TRACE="1")
    assert {row["backend"] for row in json.loads(done.stdout)} == {"embedding"}
    assert "call qompose_backend: done in" in done.stderr


def test_an_excluded_backend(folder: Path) -> None:
    done = run(folder, "capabilities", "xnnpack", code=1, QOMPOSE_PLUGINS="embedding")
    assert "QOMPOSE_PLUGINS='embedding' excludes it" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_list(folder: Path) -> None:
    """With every plugin installed, and nothing of them imported: the command is quick."""
    rows = json.loads(run(folder, "backends", "--json").stdout)
    assert {"embedding", "x86_inductor", "xnnpack"} <= {row["name"] for row in rows}
    module = [sys.executable, "-m", "qompose", "backends", "--json"]
    same = subprocess.run(module, capture_output=True, text=True, check=True, env=variables())
    assert json.loads(same.stdout) == rows


def test_a_pipe_that_closes(folder: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" capabilities | head -n 1', str(COMMAND)],
        capture_output=True, text=True, check=True, cwd=folder, env=variables(),
    )  # fmt: skip
    assert (done.stderr, len(done.stdout.splitlines())) == ("", 1)


def test_an_interrupt(folder: Path, tmp_path: Path) -> None:
    """While it waits for data, so that the moment is known."""
    pipe = tmp_path / "slow.pt"
    os.mkfifo(pipe)
    arguments = [
        "--backend",
        "xnnpack",
        "--calibration",
        str(pipe),
        "--output",
        str(tmp_path / "m"),
    ]
    process = subprocess.Popen(
        [str(COMMAND), "quantize", "mlp.pt2", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=variables(),
    )  # fmt: skip
    deadline, writer = time.monotonic() + 120, None
    while process.poll() is None and time.monotonic() < deadline:
        try:
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # open, or its data would end
            break
        except OSError:  # nobody reads yet
            time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert writer is not None
    os.close(writer)
    assert (process.returncode, printed) == (130, "")
    assert said.endswith("qompose: interrupted\n")
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == [pipe]


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/command-line.md, from top to bottom in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    paths = os.pathsep.join([str(COMMAND.parent), os.environ["PATH"]])
    namespace: dict[str, object] = {}
    printed: list[str] = []
    for block in blocks("docs/command-line.md"):
        if block.language == "python":
            exec(compile(block.text, "command-line.md", "exec"), namespace)
        elif block.language == "sh":
            lines = block.text.replace("\\\n", " ").splitlines()
            printed = [shell(line, tmp_path, paths) for line in lines]
        else:
            assert any(matches(block.text, text) for text in printed), printed
    assert len(json.loads(Path("rows.json").read_text())) > 1
    assert Path("report.md").read_text().count("|") > 20
    assert Path("tagger.pte").exists()
    assert Path("report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    seen = qompose.Statistics.load("seen.json")
    assert {entry.facts.values for entry in seen} >= {256 * 16 * 64}, "of both jobs"


def shell(line: str, folder: Path, paths: str) -> str:
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, cwd=folder,
        env=variables(PATH=paths, COLUMNS="120"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
