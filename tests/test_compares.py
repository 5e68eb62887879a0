# SPDX-License-Identifier: Apache-2.0
"""docs/compares.md is what results and tests say today."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from docs import generate_compares
from docs.building import features, measured
from docs.building.features import FEATURES, Feature
from docs.building.measured import Time
from tests.pages import ROOT

ALL = [feature for group in FEATURES.values() for feature in group]
RESULT = """# A result

Measured on a day
on one core, by

| model | engine | ms | p10 | p90 |
|---|---|---:|---:|---:|
| a | eager | 4 | 3 | 5 |
| a | torchao | 2 | 1.5 | 2.5 |
| a | torchao package | 3 | 2.5 | 3.5 |
| a | qompose | 1 | 0.5 | 1.4 |
| b | torchao | failed | | |
| b | openvino | 1 | 0.9 | 1.1 |
| b | qompose | 2 | 1 | 3 |
"""


def test_the_page_is_what_its_generator_writes_today() -> None:
    """To write it: python -m docs.generate_compares."""
    assert generate_compares.page() == generate_compares.PAGE.read_text("utf-8")


def test_every_result_with_peers_is_on_the_page() -> None:
    text = generate_compares.PAGE.read_text("utf-8")
    for file in (ROOT / "benchmarks" / "results").glob("*.md"):
        has_peers = "| torchao" in file.read_text("utf-8")
        assert not has_peers or f"results/{file.name})" in text


@pytest.mark.parametrize("feature", ALL, ids=lambda feature: feature.name)
def test_a_feature_is_shown_by_a_test(feature: Feature) -> None:
    """What we claim has a test; what we lack has none; each peer has a mark."""
    assert feature.ours in ("Y", "P", "N")
    marks = feature.peers.split()
    assert len(marks) == len(features.PEERS)
    assert {*marks} <= {*features.MARKS}
    assert bool(feature.test) == (feature.ours != "N")
    if feature.test:
        file, _, name = feature.test.partition("::")
        assert _has(ROOT / "tests" / file, name)


def _has(file: Path, name: str) -> bool:
    """Tell whether a file of tests has a test or a class of that name; any, where there is none."""
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return name in names if name else any(each.startswith("test_") for each in names)


def test_a_result_is_read() -> None:
    result = measured.result_of("x", RESULT)
    assert result is not None
    assert (result.title, result.unit) == ("A result", "ms")
    assert result.conditions == "Measured on a day on one core"
    assert result.products() == ["torchao", "openvino"]
    assert result.failed == {"b": {"torchao"}}
    found = {
        (model, peer): measured.verdict(*times)
        for model, peer, *times in measured.duels(result, ["torchao", "openvino", "float"])
    }
    assert found == {("a", "torchao"): "ahead", ("a", "float"): "ahead", ("b", "openvino"): "even"}


def test_shares_of_models_are_read() -> None:
    """The table of flows alone, and as it stands."""
    text = (
        "# Zoo\n\n| model | x |\n|---|---|\n| a | 1 |\n\n| flow | models | work |\n|---|---|---|\n"
    )
    found = measured.shares_of("zoo", text + "| torchao | 2 | 50% |\n\n| other | t |\n|---|---|\n")
    assert found is not None
    assert (found.title, found.header) == ("Zoo", ("flow", "models", "work"))
    assert found.rows == (("torchao", "2", "50%"),)
    assert measured.shares_of("x", RESULT) is None


def test_what_has_no_times_is_no_result() -> None:
    assert measured.result_of("x", "# Words\n\n| a | b |\n|---|---|\n| 1 | 2 |\n") is None
    with pytest.raises(ValueError, match="could not convert"):
        measured.result_of("x", RESULT.replace("1.5", "soon"))


@pytest.mark.parametrize(
    ("ours", "verdict"), [((1, 0.9, 1.9), "ahead"), ((2, 1, 3), "even"), ((4, 3.5, 5), "behind")]
)
def test_verdicts(ours: tuple[float, float, float], verdict: str) -> None:
    """Times differ where the middle eight tenths do not touch."""
    assert measured.verdict(Time("qompose", *ours), Time("peer", 2.5, 2, 3)) == verdict


def test_only_engines_that_do_the_same_count() -> None:
    rows = RESULT + "| a | qompose 2 bits | 0.1 | 0.1 | 0.1 |\n| a | qompose 8 bits | 1 | 1 | 1 |\n"
    result = measured.result_of("embedding_lookup_x", rows)
    assert result is not None
    best = result.best("a", ("qompose",))
    assert best is not None
    assert math.isclose(best.median, 1) and best.engine == "qompose 8 bits"
