# SPDX-License-Identifier: Apache-2.0
"""What is printed: tables as text of a given width, as Markdown and for rich, with the progress bar.

Nothing is cut off: what does not fit into a column goes on in the next line. The bar is on stderr, so that
what a program prints stays its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:  # else where it is used: messages of the command line need none of rich
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import Progress
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """A table. A row of one cell is a heading over the rows that follow. Columns of numbers align right.

    `styles` are colours of headings, by their text, where a rich console prints the table.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    styles: Mapping[str, str] = field(default_factory=dict)

    def is_numeric(self, column: int) -> bool:
        """Return whether every cell of a column is a number."""
        cells = [row[column] for row in self.rows if len(row) > 1]
        return bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)


Block: TypeAlias = str | Table
"""A piece of what is printed: a line of text, or a table."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 kernel`, `2 kernels`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def printable(text: str) -> str:
    """Return text with control characters written out: names of plugins may hold escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def as_decibels(ratio: float | None) -> str:
    """Return a signal to noise ratio in dB as text: of equal values it is infinite; nothing for None."""
    if ratio is None:
        return ""
    return "equal" if ratio == math.inf else f"{ratio:.1f} dB"


class Printable:
    """What consists of blocks: printed as text, as Markdown, and by a rich console."""

    _columns: ClassVar[int] = 80

    def _blocks(self) -> Sequence[Block]:
        raise NotImplementedError

    def to_text(self, width: int | None = None, *, colors: bool = False) -> str:
        """Return it as text of at most `width` columns, or as `print` shows it; nothing is cut off.

        Args:
            colors: with the escape sequences that terminals show as colours, unless `NO_COLOR` is set.
        """
        return as_text(self._blocks(), width or self._columns, colors=colors)

    def to_markdown(self) -> str:
        """Return it as Markdown."""
        return as_markdown(self._blocks()).rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from as_rich(self._blocks(), options.max_width)

    def __str__(self) -> str:
        return self.to_text()


def as_rich(blocks: Sequence[Block], width: int) -> Iterator[Any]:
    """Yield what a rich console of so many columns prints. Square brackets are text, not markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for block in blocks:
        if isinstance(block, Table) and not _fits(block, width):
            yield from _listed(block)
        elif isinstance(block, Table):
            yield _rich_table(block, width)
        elif block.startswith("- "):
            item = RichTable.grid(padding=(0, 1))
            item.add_column()
            item.add_column(overflow="fold")
            item.add_row("-", Text(printable(block[2:])))
            yield item
        else:
            yield Text(printable(block))


def _listed(table: Table) -> Iterator[Any]:
    """Yield the rows of a table that is too wide, each with its cells one below the other."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for row in table.rows:
        yield Text(printable(_cell(row[0])))
        if len(row) > 1:
            item = RichTable.grid(padding=(0, 1))
            item.add_column()
            item.add_column(overflow="fold")
            told = (
                (t, cell) for t, cell in zip(table.header[1:], row[1:], strict=True) if _cell(cell)
            )
            for title, cell in told:
                item.add_row(f"  {title}", Text(printable(_cell(cell))))
            yield item


def _fits(table: Table, columns: int) -> bool:
    """Tell whether a table has space for all its columns, with the longest words broken at most."""
    shortest = _extents(table)[1]
    free = columns - 2 * len(shortest)
    return sum(_broken(shortest, free)) <= free


def _rich_table(table: Table, columns: int) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    result = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    widths = _widths(table, columns - 2 * len(table.header))
    for column, title in enumerate(table.header):
        numeric = table.is_numeric(column)
        result.add_column(
            title,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric,
            width=widths[column],
        )
    for row in table.rows:
        cells = [Text(printable(_cell(cell))) for cell in row]
        style = f"bold {table.styles.get(str(row[0]), '')}".strip() if len(row) == 1 else ""
        result.add_row(*cells, style=style)
    return result


def _extents(table: Table) -> tuple[list[int], list[int]]:
    """Return how wide each column is where no cell is wrapped, and where all are, between words."""
    from rich.cells import cell_len

    longest, shortest = [], []
    for column, title in enumerate(table.header):
        cells = [_cell(row[column]) for row in table.rows if len(row) > 1]
        wraps = not table.is_numeric(column)
        headings = [_cell(row[0]) for row in table.rows if len(row) == 1 and not column]
        longest.append(max(map(cell_len, (title, *cells, *headings)), default=0))
        words = (word for cell in (title, *cells) for word in (cell.split() if wraps else [cell]))
        shortest.append(max(map(cell_len, words), default=0))
    return longest, shortest


def _widths(table: Table, columns: int) -> list[int | None]:
    """Return widths of columns, in which few words are broken; None for each where rich may choose."""
    longest, shortest = _extents(table)
    if sum(shortest) > columns:
        shortest = _broken(shortest, columns)
    free = columns - sum(shortest)
    wanted = [long - short for long, short in zip(longest, shortest, strict=True)]
    if free < 0 or sum(wanted) <= free:
        return [None] * len(longest)
    result: list[int | None] = [*shortest]
    narrowest_first = sorted(range(len(wanted)), key=wanted.__getitem__)
    for left, column in zip(range(len(wanted), 0, -1), narrowest_first, strict=True):
        share = min(wanted[column], free // left)
        result[column] = shortest[column] + share
        free -= share
    return result


def _broken(shortest: Sequence[int], columns: int) -> list[int]:
    """Return widths that break the longest words, and those as little as they can, if that is enough."""
    for bound in range(max(shortest), _LEAST_WIDTH - 1, -1):
        widths = [min(width, bound) for width in shortest]
        if sum(widths) <= columns:
            return widths
    return list(shortest)


_LEAST_WIDTH = 12
"""The least columns for words that are broken: with fewer, each row is a list of its cells."""


def as_text(blocks: Sequence[Block], width: int, *, colors: bool = False) -> str:
    """Return blocks as text of at most `width` columns, without spaces at the ends of lines."""
    from rich.console import Console

    file = StringIO()
    console = Console(
        file=file,
        width=width,
        color_system="standard" if colors else None,
        force_terminal=colors,
    )
    for part in as_rich(blocks, width):
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
    return _in_a_line(_cell(cell).strip().replace("\\", "\\\\").replace("|", "\\|"))


def _in_a_line(text: str) -> str:
    """Return text without what Markdown would take for a tag, or for the end of a paragraph."""
    return "<br>".join(text.replace("<", "\\<").split("\n"))


def _cell(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def on_terminal(progress: bool | None) -> bool:
    """Return whether to show a bar; None leaves it to whether a person is looking."""
    if progress is not None:
        return progress
    asks = getattr(sys.stderr, "isatty", None)  # there may be no stderr, or a program's own object
    return asks is not None and bool(asks())


def progress_bar(shown: bool, *, elapsed: bool = False) -> Progress:
    """Return a bar that counts and says how long it will take; hidden, it does nothing.

    Args:
        elapsed: say how long it has taken instead: of unequal steps, nobody knows the rest.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn() if elapsed else TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


_staging: ContextVar[bool] = ContextVar("qompose_staging", default=False)


@contextmanager
def staging(progress: bool | None) -> Iterator[None]:
    """Let `stages` show a bar, or not; None leaves it to whether a person is looking."""
    token = _staging.set(on_terminal(progress))
    try:
        yield
    finally:
        _staging.reset(token)


@contextmanager
def stages(total: int) -> Iterator[Callable[[str], None]]:
    """Show what a target's last step is at, where it takes long: a bar, if `lower` is to show one.

    Args:
        total: how many stages there will be.

    Yields:
        what takes the name of each stage when it begins.
    """
    with progress_bar(_staging.get(), elapsed=True) as bar:
        task = bar.add_task("", total=total)
        begun = -1

        def begin(name: str) -> None:
            nonlocal begun
            begun += 1
            bar.update(task, description=name, completed=begun)

        yield begin
        bar.update(task, completed=total)
