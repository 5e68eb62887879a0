# SPDX-License-Identifier: Apache-2.0
"""Figures that were measured before: a table of benchmarks/results, when and by which command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Page:
    """A page of results: its first table, cells as they stand there, by column."""

    path: Path
    date: str
    command: str
    rows: tuple[dict[str, str], ...]

    @property
    def source(self) -> str:
        """When, where and by which command, in a sentence."""
        place = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"measured on {self.date}, not in this run ({place}), by\n  {self.command}"

    def table(self, columns: Sequence[str], title: str) -> Table:
        """Every row but that of the float network: the engine, and `columns` or that it failed."""
        table = Table("engine", title=title)
        for column in columns:
            table.add_column(column, justify="right")
        for row in self.rows:
            if row["engine"] != "float":
                failed = "failed" in row.values()
                table.add_row(row["engine"], *(["failed"] if failed else map(row.get, columns)))
        return table


def read(path: Path) -> Page:
    """Read what `benchmarks/accuracy.py --page` wrote.

    Raises:
        ValueError: the page says no date or command, or has no table of engines.
    """
    text = path.read_text("utf-8")
    date = re.search(r"^Measured on (\S+)", text, re.MULTILINE)
    command = re.search(r"^```sh\n(.+)\n```$", text, re.MULTILINE)
    table = re.search(r"^\| engine \|.*\n\|[-:|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    if not (date and command and table):
        raise ValueError(f"{path} is no page of results with date, command and table of engines")
    header, _, *rows = (_cells(line) for line in table[0].splitlines())
    found = tuple(dict(zip(header, row, strict=True)) for row in rows)
    return Page(path, date[1], command[1], found)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]
