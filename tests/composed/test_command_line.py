# SPDX-License-Identifier: Apache-2.0
"""The command with the plugins installed: processes, files and pages. Mistakes are in tests/core/cli."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.cli import main
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import Dim

from tests.core.toy import Model
from tests.pages import blocks
from tests.reader import matches

pytestmark = pytest.mark.filterwarnings("always::qompose.QomposeWarning")  # they become messages

COMMAND = Path(sys.executable).with_name("qompose")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs and data for them."""
    folder = tmp_path_factory.mktemp("work")
    torch.manual_seed(0)
    batch = Dim("batch", min=2, max=32)
    tagger = Model(
        lambda m, ids, *, weight: m.out((m.hidden(m.table(ids)) * weight).relu()),
        table=nn.Embedding(50, 16),
        hidden=nn.Linear(16, 32),
        out=nn.Linear(32, 4),
    )
    program = torch.export.export(
        tagger.eval(),
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


@pytest.fixture
def command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Return what runs the command in this process, and returns what it printed and said."""
    monkeypatch.chdir(folder)

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        found = main.main(arguments)
        printed, said = capsys.readouterr()
        assert found == code, said
        return printed, said

    return run


def run_in(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    done = subprocess.run(
        [str(COMMAND), *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env=variables(**more),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.full
def test_from_an_exported_program_to_int8_kernels_and_back(folder: Path) -> None:
    """Quantize in one process, report in another, lower in a third."""
    line = "quantize tagger.pt2 --backend embedding --backend xnnpack --json --strict"
    done = run_in(folder, *line.split(), "--calibration", "tagger.safetensors")
    lowered = json.loads(done.stdout)
    states = {(row["owner"], row["state"]) for row in lowered["rows"]}
    assert states == {("embedding", "float kernel on integers"), ("xnnpack", "int8 kernel")}
    assert "qompose: wrote tagger.qompose (" in done.stderr
    assert "\r" not in done.stderr  # no progress bar: it is no terminal

    text = run_in(folder, "report", "tagger.qompose", QOMPOSE_PLUGINS="").stdout
    assert "embedding" in text
    assert "simulated (Q/DQ)" in text

    program = torch.export.load(folder / "tagger.pt2").module()
    model = qompose.lower(qompose.load(folder / "tagger.qompose"))
    data = load_file(folder / "tagger.safetensors")
    ids, weight = data["ids"][:3], data["weight"][:3]
    with torch.no_grad():
        error = model(ids, weight=weight) - program(ids, weight=weight)
    assert error.abs().max() < 0.05


QUANTIZE = ("quantize", "mlp.pt2", "--backend", "xnnpack", "--calibration", "mlp.pt")


def test_pages(folder: Path, command: Callable[..., tuple[str, str]]) -> None:
    """Of what runs, beside what is saved, and of a saved model."""
    arguments = ("--output", "paged.qompose", "--html", "lowered.html", "--json")
    printed, _ = command(*QUANTIZE, *arguments)
    lowered = (folder / "lowered.html").read_text("utf-8")
    assert lowered == as_page(json.loads(printed), folder / "expected.html")
    printed, _ = command("report", "paged.qompose", "--html", "saved.html", "--json")
    saved = (folder / "saved.html").read_text("utf-8")
    assert saved == as_page(json.loads(printed), folder / "expected.html") != lowered


def as_page(data: Any, file: Path) -> str:
    qompose.Report.from_dict(data).save(file)
    return file.read_text("utf-8")


def test_pages_that_cannot_be(folder: Path, command: Callable[..., tuple[str, str]]) -> None:
    """Said in one line, before anything is written."""
    before = sorted(folder.iterdir())
    for output, page in (
        ("never.qompose", "never.json"),
        ("never.qompose", "nowhere/never.html"),
        ("a.html", "a.html"),
    ):
        _, said = command(*QUANTIZE, "--output", output, "--html", page, code=1)
        assert page.partition("/")[0] in said
        assert len(said.splitlines()) == 1
    assert sorted(folder.iterdir()) == before


@pytest.mark.full
def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/command-line.md, from top to bottom in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QOMPOSE_PLUGINS", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    namespace: dict[str, object] = {}
    printed: list[str] = []
    for block in blocks("docs/command-line.md"):
        if block.language == "python":
            exec(compile(block.text, "command-line.md", "exec"), namespace)
        elif block.language == "sh":
            printed.clear()
            for line in block.text.replace("\\\n", " ").splitlines():
                command, _, file = line.partition(" > ")
                name, *arguments = shlex.split(command)
                assert (name, main.main(arguments)) == ("qompose", 0), capsys.readouterr().err
                printed.append(capsys.readouterr().out)
                if file:
                    Path(file).write_text(printed.pop())
        else:
            assert any(matches(block.text, text) for text in printed), printed
    assert len(json.loads(Path("rows.json").read_text())) > 1
    assert Path("report.md").read_text().count("|") > 20
    assert Path("tagger.pte").exists()
    assert Path("report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    seen = qompose.Statistics.load("seen.json")
    assert {entry.facts.values for entry in seen} >= {256 * 16 * 64}, "of both jobs"
