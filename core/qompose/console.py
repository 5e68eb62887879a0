# SPDX-License-Identifier: Apache-2.0
"""What is printed: tables as text of a given width, as Markdown and for rich, with the progress bar.

Nothing is cut off: what does not fit into a column goes on in the next line. The bar is on stderr, so that
what a program prints stays its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, ClassVar, TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """A table. A row of one cell is a heading over the rows behind it. Columns of numbers align right."""

    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def is_numeric(self, column: int) -> bool:
        """Return whether every cell of a column is a number."""
        cells = [row[column] for row in self.rows if len(row) > 1]
        return bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)


Block: TypeAlias = str | Table
"""A piece of what is printed: a line of text, or a table."""


def as_decibels(ratio: float | None) -> str:
    """Return a signal to noise ratio in dB as text: of equal values it is infinite; nothing for None."""
    if ratio is None:
        return ""
    return "equal" if ratio == math.inf else f"{ratio:.1f} dB"


class Printable:
    """What consists of blocks: printed as text, as Markdown, and by a rich console."""

    _columns: ClassVar[int] = 120

    def _blocks(self) -> Sequence[Block]:
        raise NotImplementedError

    def to_text(self, width: int | None = None) -> str:
        """Return it as text of at most `width` columns, or as `print` shows it; nothing is cut off."""
        return as_text(self._blocks(), width or self._columns)

    def to_markdown(self) -> str:
        """Return it as Markdown."""
        return as_markdown(self._blocks()).rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from as_rich(self._blocks())

    def __str__(self) -> str:
        return self.to_text()


def as_rich(blocks: Sequence[Block]) -> Iterator[Any]:
    """Yield what a rich console prints. Square brackets are text, not markup."""
    for block in blocks:
        yield Text(block) if isinstance(block, str) else _rich_table(block)


def _rich_table(table: Table) -> RichTable:
    result = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, title in enumerate(table.header):
        numeric = table.is_numeric(column)
        result.add_column(
            title, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric
        )
    for row in table.rows:
        cells = [Text(_cell(cell)) for cell in row]
        result.add_row(*cells, style="bold" if len(row) == 1 else "")
    return result


def as_text(blocks: Sequence[Block], width: int) -> str:
    """Return blocks as plain text of at most `width` columns, without spaces at the ends of lines."""
    file = StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False)
    for part in as_rich(blocks):
        console.print(part, markup=False, highlight=False, overflow="fold")
    return _joined([line.rstrip() for line in file.getvalue().splitlines()])


def _joined(lines: Sequence[str]) -> str:
    """Join lines, with one empty line where there were several, and none at the ends."""
    kept = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
    return "\n".join(kept).rstrip("\n")


def as_markdown(blocks: Sequence[Block]) -> str:
    """Return blocks as Markdown: lines are paragraphs of their own, tables have pipes."""
    return _joined([line for block in blocks for line in _markdown(block)])


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        yield _in_a_line(block)
        return
    yield ""
    yield "| " + " | ".join(map(_escaped, block.header)) + " |"
    rule = ("---:|" if block.is_numeric(i) else "---|" for i in range(len(block.header)))
    yield "|" + "".join(rule)
    for row in block.rows:
        cells = [*map(_escaped, row), *[""] * (len(block.header) - len(row))]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _escaped(cell: object) -> str:
    return _in_a_line(_cell(cell).replace("\\", "\\\\").replace("|", "\\|"))


def _in_a_line(text: str) -> str:
    """Return text without what Markdown would take for a tag, or for the end of a paragraph."""
    return "<br>".join(text.replace("<", "\\<").split("\n"))


def _cell(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def on_terminal(progress: bool | None) -> bool:
    """Return whether to show a bar; None leaves it to whether a person is looking."""
    return sys.stderr.isatty() if progress is None else progress


def progress_bar(shown: bool) -> Progress:
    """Return a bar that counts and says how long it will take; hidden, it does nothing."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not shown)
