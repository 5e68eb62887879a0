# SPDX-License-Identifier: Apache-2.0
"""docs/compares.md is what the measured results say, and one command prints every table of benchmarks/."""

from __future__ import annotations

from importlib import import_module

import pytest

from docs import generate_compares
from docs.comparison import measured
from docs.comparison.measured import Time
from tests.pages import ROOT


def test_the_page_is_what_its_generator_writes_today() -> None:
    """To write it: python -m docs.generate_compares."""
    assert generate_compares.page() == generate_compares.PAGE.read_text("utf-8")


def test_the_command_knows_every_script(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    known = {benchmark.name for benchmark in import_module("all").BENCHMARKS}
    scripts = {f.stem for f in folder.glob("*.py") if "__main__" in f.read_text("utf-8")}
    assert scripts - {"all"} == known


def test_every_result_with_peers_is_on_the_page() -> None:
    text = generate_compares.PAGE.read_text("utf-8")
    for file in (ROOT / "benchmarks" / "results").glob("*.md"):
        has_peers = "| torchao" in file.read_text("utf-8")
        assert not has_peers or f"results/{file.name})" in text


def test_files_are_compared_in_the_same_runtime() -> None:
    """Our file in a faster runtime does not beat a peer's in a slower one."""
    engines = {"ours, ONNX Runtime": 3, "onnxruntime.quantization": 2, "ours, OpenVINO": 1}
    rows = "".join(f"| mlp | {name} | {ms} | {ms} | {ms} |\n" for name, ms in engines.items())
    found = measured.result_of("onnx", f"| model | engine | ms | p10 | p90 |\n|---|---|\n{rows}")
    assert found is not None and found.products() == ["onnxruntime.quantization"]
    ((_, _, ours, theirs),) = measured.duels(found, found.products())
    assert (ours.median, theirs.median) == (3, 2)


def test_the_last_table_of_a_model_counts() -> None:
    head = "| model | engine | ms | p10 | p90 |\n|---|---|\n"
    tables = [
        "| mlp | qompose | 1 | 1 | 1 |\n| mlp | torchao | failed | | |\n",
        "| mlp | torchao | 3 | 3 | 3 |\n",
    ]
    found = measured.result_of("x86", "\n".join(head + table for table in tables))
    assert found is not None and not found.failed
    assert [time.engine for time in found.times["mlp"]] == ["torchao"]


@pytest.mark.parametrize(
    ("ours", "verdict"), [((1, 0.9, 1.9), "ahead"), ((2, 1, 3), "even"), ((4, 3.5, 5), "behind")]
)
def test_verdicts(ours: tuple[float, float, float], verdict: str) -> None:
    """Times differ where the middle eight tenths do not touch."""
    assert measured.verdict(Time("qompose", *ours), Time("peer", 2.5, 2, 3)) == verdict
