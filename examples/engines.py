# SPDX-License-Identifier: Apache-2.0
"""Engines: ways to run one model, in float or as a composition of backends quantized it for a target."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import qompose
from rich.table import Table
from steps import Steps
from torch import Tensor
from torch.export import ExportedProgram

INT8 = "int8 kernel"
"""What a report calls an operator that an integer kernel computes."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A callable, the bytes of its weights or file, and qompose's report where it is quantized."""

    name: str
    run: Callable[..., Tensor]
    nbytes: int
    report: qompose.Report | None = None


@dataclass(frozen=True, slots=True)
class Composition:
    """A model quantized once, and by target what became of it."""

    backends: tuple[str, ...]
    quantized: qompose.QuantizedModel
    lowered: dict[str, Any]

    def engine(self, target: str, name: str) -> Engine:
        """The lowered model of a target."""
        report = qompose.report(self.lowered[target])
        return Engine(name, self.lowered[target], report.bytes_after, report)

    def table(self) -> Table:
        """What happened to every kind of operator, and who took it, on each target."""
        reports = {target: qompose.report(model) for target, model in self.lowered.items()}
        first = next(iter(reports.values()))
        table = operators_table(reports)
        table.title = f"What happened to every operator: {' + '.join(self.backends)}"
        table.caption = (
            f"rewrites: {len(first.rewrites)}; requantizations where owners meet: "
            f"{len(first.requantizations)}; claims that lost to others: {len(first.conflicts)}"
        )
        return table


def quantize(
    exported: ExportedProgram,
    backends: Sequence[str],
    targets: Sequence[str],
    calibration: Collection[tuple[Tensor, ...]],
    steps: Steps,
) -> Composition:
    """Prepare, calibrate and convert once; lower the converted model to each of `targets`."""
    name = " + ".join(backends)
    with steps.step(f"{name}: quantize for {targets[0]}") as track:
        result = qompose.quantize(
            exported,
            backends=backends,
            calibration=track(calibration),
            target=targets[0],
            progress=False,
        )
    lowered = {targets[0]: result.model}
    for target in targets[1:]:
        with steps.step(f"{name}: lower the same model to {target}"), _listed_in_the_table():
            lowered[target] = qompose.lower(result.converted, target)
    return Composition(tuple(backends), result, lowered)


def int8_share(report: qompose.Report, operators: Collection[str]) -> float:
    """The part of the multiply-accumulates of `operators` that static int8 kernels compute."""
    rows = [row for row in report.rows if row.operator in operators]
    static = [row for row in rows if row.state == INT8 and row.mode == "static"]
    return sum(row.macs for row in static) / sum(row.macs for row in rows)


def operators_table(reports: dict[str, qompose.Report]) -> Table:
    """One row for all operators that had the same fate on every target, the most work first."""
    kinds: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    macs: Counter[tuple[str, ...]] = Counter()
    for rows in zip(*(report.rows for report in reports.values()), strict=True):
        key = (rows[0].owner or "-", *map(_fate, rows))
        kinds[key][_short(rows[0].operator)] += 1
        macs[key] += rows[0].macs
    table = Table("operators", "MACs", "taken by", *(f"on {t}" for t in reports))
    table.columns[1].justify = "right"
    total = macs.total()
    for key in sorted(kinds, key=lambda key: (-macs[key], key)):
        names = ", ".join(f"{count} {name}" for name, count in kinds[key].most_common())
        table.add_row(names, f"{macs[key] / total:.1%}" if macs[key] else "", *key)
    return table


def _fate(row: Any) -> str:
    state = "int8" if row.state == INT8 else row.state
    return f"{state}: {row.kernel or row.reason}" if row.kernel or row.reason else state


def _short(operator: str) -> str:
    """`aten.add.Tensor` -> `add`."""
    return operator.removeprefix("aten.").partition(".")[0]


@contextmanager
def _listed_in_the_table() -> Iterator[None]:
    """The warning about regions without an int8 kernel says what the table says."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"\d+ quantized regions? (has|have) no int8 kernel", qompose.QomposeWarning
        )
        yield
