# SPDX-License-Identifier: Apache-2.0
"""What the tables of benchmarks/results say: of each model, how long the engines take, and who is ahead.

A result is a page with a table of one row for each model and engine. Its times count as different only where
the ranges from the tenth to the ninetieth percentile do not touch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS = ("ms", "us")

# By the beginning of a result's name, which engines of ours do what the peers' engines do: the same bits, and
# observers of the same kind. Where nothing is said, all of them.
LIKE: dict[str, tuple[str, ...]] = {
    "calibration": ("qompose x86 histogram",),
    "embedding_lookup": ("qompose 8 bits",),
    "tables": ("qompose 8 bits",),
}

# What runs the file of an engine whose name does not end in ", RUNTIME".
RUNTIMES = {"onnxruntime.quantization": "ONNX Runtime"}

OURS, FLOAT, LIMIT = "qompose", "float", "limit"
AHEAD, EVEN, BEHIND = "ahead", "even", "behind"


@dataclass(frozen=True)
class Time:
    """How long an engine takes for one call: the median, and where eight of ten are.

    Attributes:
        engine: its name in the result.
        median, low, high: in the unit of the result; `low` and `high` are percentiles 10 and 90.
    """

    engine: str
    median: float
    low: float
    high: float

    @property
    def product(self) -> str:
        """Return whose engine it is: "qompose", "float", "limit", or the first word of its name."""
        if "qompose" in self.engine or self.engine.startswith("ours, "):
            return OURS
        if "float" in self.engine or self.engine == "eager":
            return FLOAT
        return LIMIT if self.engine == "memory limit" else self.engine.split()[0].rstrip(",")

    @property
    def runtime(self) -> str:
        """Return what runs the engine's file, "" where the engine runs by itself."""
        return RUNTIMES.get(self.engine, self.engine.partition(", ")[2])


@dataclass(frozen=True)
class Result:
    """One page of results.

    Attributes:
        name: of its file, without a suffix.
        title: its heading.
        conditions: what stands below that, up to the command.
        unit: of all times, "ms" or "us".
        times: by model, of the engines that ran.
        failed: by model, the products whose engines all failed.
    """

    name: str
    title: str
    conditions: str
    unit: str
    times: dict[str, list[Time]]
    failed: dict[str, set[str]]

    def products(self) -> list[str]:
        """Return the peers, in the order of the table."""
        found = [time.product for times in self.times.values() for time in times]
        found += [product for products in self.failed.values() for product in sorted(products)]
        return [each for each in dict.fromkeys(found) if each not in (OURS, FLOAT, LIMIT)]

    def best(self, model: str, products: Sequence[str], runtime: str | None = None) -> Time | None:
        """Return the fastest of some products on a model, in any or a given runtime; None if none ran."""
        found = [
            time
            for time in self.times[model]
            if time.product in products and runtime in (None, time.runtime)
        ]
        return min(found, key=lambda time: time.median, default=None)


def results(folder: Path) -> list[Result]:
    """Return the results in a folder, in order of name; pages without times of peers are none."""
    found = [result_of(file.stem, file.read_text("utf-8")) for file in sorted(folder.glob("*.md"))]
    return [result for result in found if result is not None and result.products()]


def result_of(name: str, text: str) -> Result | None:
    """Return what a page says, None where it has no table of times.

    Of a model in several tables, the last counts: they were measured on different machines.

    Raises:
        ValueError: a time is no number.
    """
    rows = _timed(text)
    header = rows[0] if rows else []
    unit = next((each for each in UNITS if each in header), None)
    if unit is None:
        return None
    columns = [header.index(each) for each in (unit, "p10", "p90")]
    times: dict[str, list[Time]] = {}
    failed: dict[str, set[str]] = {}
    of_table: set[str] = set()
    for row in rows[2:]:
        model, engine = row[header.index("model")], row[header.index("engine")]
        if model == "model" or not model.strip("-:"):  # the head of another table of the page
            of_table = set()
            continue
        if model not in of_table:
            of_table.add(model)
            times[model] = []
            failed.pop(model, None)
        known = times[model]
        if row[columns[0]] == "failed":
            failed.setdefault(model, set()).add(Time(engine, 0, 0, 0).product)
        elif _counts(name, engine):
            known.append(Time(engine, *(float(row[column]) for column in columns)))
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    conditions = re.search(r"^Measured .+?(?=, by$|\n\n)", text, re.MULTILINE | re.DOTALL)
    return Result(
        name,
        title[1] if title else name,
        " ".join(conditions[0].split()) if conditions else "",
        unit,
        times,
        failed,
    )


def _timed(text: str) -> list[list[str]]:
    """Return the rows of all tables with times of engines, heads included."""
    found = re.findall(r"(?:^\|.*\n)+", f"{text}\n", re.MULTILINE)
    tables = [[*map(_cells, table.splitlines())] for table in found]
    return [row for t in tables if {"model", "engine", "p10", "p90"} <= {*t[0]} for row in t]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _counts(name: str, engine: str) -> bool:
    chosen = next((engines for start, engines in LIKE.items() if name.startswith(start)), ())
    return "qompose" not in engine or not chosen or engine in chosen


def verdict(ours: Time, theirs: Time) -> str:
    """Return whether ours is ahead, behind, or even: their middle eight tenths touch."""
    if ours.high < theirs.low:
        return AHEAD
    return BEHIND if ours.low > theirs.high else EVEN


def duels(result: Result, products: Sequence[str]) -> Iterator[tuple[str, str, Time, Time]]:
    """Yield (model, product, our fastest, its fastest) wherever both ran, in the same runtime."""
    for model in result.times:
        for product in products:
            theirs = result.best(model, (product,))
            ours = None if theirs is None else result.best(model, (OURS,), theirs.runtime)
            if ours is not None and theirs is not None:
                yield model, product, ours, theirs
