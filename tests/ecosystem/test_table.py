# SPDX-License-Identifier: Apache-2.0
"""benchmarks/results/ecosystem.md is what the quantizers do today, and says why wherever one does nothing."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import qompose

from docs.generate_ecosystem import INTRODUCTION
from tests.ecosystem.catalogue import BY_NAME, CATALOGUE, NO_MEMBERS
from tests.ecosystem.measuring import ENGINES, TOLERANCE, Cell, by_qompose, measure, quietly
from tests.ecosystem.models import KINDS, sample
from tests.ecosystem.reasons import REASONS, reason_for

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "ecosystem.md"


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a heading of the page."""
    section = PAGE.read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


ROWS = {row[0]: row[1:] for row in table("Quantizer by model")}


def test_the_page_is_what_its_generator_writes_today() -> None:
    assert PAGE.read_text("utf-8").startswith(INTRODUCTION)


def test_every_quantizer_of_the_catalogue_has_a_row() -> None:
    assert [*ROWS] == [entry.name for entry in CATALOGUE]


def compare(shown: str, found: Cell) -> None:
    """Counts and state are the same; decibels nearly so."""
    text, decibels = re.fullmatch(r"(.*?)(?:, ([\d.]+|inf) dB)?", shown).groups()  # type: ignore[union-attr]
    assert text == re.sub(r", [\d.inf]+ dB$", "", str(found))
    if decibels is not None and not math.isinf(found.sqnr):
        assert abs(float(decibels) - found.sqnr) <= TOLERANCE


def _cells() -> Iterator[object]:
    """Every run has the first of each family on one model, in turn.

    CoreML's and XNNPACK's export patterns for long, and some are TOSA's.
    """
    families: set[str] = {"CoreML", "XNNPACK", "EthosU", "VGF"}
    for entry in CATALOGUE:
        turn = (2 - len(families)) % len(KINDS)
        for number, kind in enumerate(KINDS):
            later = entry.family in families or number != turn
            marks = [pytest.mark.full] if later else []
            yield pytest.param(entry.name, kind, marks=marks)
        families.add(entry.family)


@pytest.mark.parametrize(("name", "kind"), [*_cells()])
def test_a_cell_is_what_is_computed_anew(name: str, kind: str) -> None:
    shown = ROWS[name][len(ENGINES) * [*KINDS].index(kind) :]
    with quietly():
        for text, engine in zip(shown, ENGINES, strict=False):
            compare(text, measure(BY_NAME[name], kind, engine))


EXPLAINED = ("What our engine does not quantize, and why", "Where the two engines differ")


@pytest.mark.parametrize(
    ("name", "kinds", "reason"),
    [pytest.param(*row, id=f"{row[0]}: {row[1]}") for title in EXPLAINED for row in table(title)],
)
def test_what_is_not_as_expected_is_explained(name: str, kinds: str, reason: str) -> None:
    assert reason
    assert {reason_for(name, kind) for kind in kinds.split(", ")} == {reason}


def test_no_reason_is_out_of_date() -> None:
    explained = {row[0] for heading in EXPLAINED for row in table(heading)}
    assert {name for name, _ in REASONS} == explained


def test_our_engine_fails_in_its_own_words() -> None:
    """Whatever a member raises reaches the caller as an error of qompose."""
    ours = [row for row in table("Errors") if row[2] == "qompose"]
    kinds = {row[3].partition(":")[0] for row in ours}
    assert all(
        issubclass(getattr(qompose.errors, kind, object), qompose.QomposeError) for kind in kinds
    )


@pytest.mark.parametrize("path", NO_MEMBERS)
@pytest.mark.filterwarnings("ignore")  # the packages' own, while they are imported
def test_what_is_no_member_is_none(path: str) -> None:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return
    assert not hasattr(found, "annotate")


NO_OPS = [
    (name, kind)
    for name, row in ROWS.items()
    for kind, cell in zip(KINDS, row[1:-1:2], strict=True)
    if "no-op" in cell
]


@pytest.mark.parametrize(("name", "kind"), NO_OPS, ids=": ".join)
def test_a_no_op_is_not_silent(name: str, kind: str) -> None:
    (_, prepare), *_ = by_qompose(BY_NAME[name], sample(kind))
    with pytest.warns(qompose.QomposeWarning, match="Nothing was quantized"):
        prepare()
