# SPDX-License-Identifier: Apache-2.0
"""`qompose report`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qompose.cli.output import Output, say
from qompose.errors import UserError
from qompose.files import destination

if TYPE_CHECKING:
    from qompose.reporting.report_data import Report


SUMMARY = "show what happened to every operator of a saved model"
DESCRIPTION = """\
Show the report of a model that qompose.save or `qompose quantize` wrote: who took which operator, and why the
rest is float. No backend needs to be installed for that, and no code of the file is run."""
EXAMPLES = """\
qompose report model.qompose
qompose report model.qompose --markdown > report.md
qompose report model.qompose --html report.html"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the saved model")
    add_format(parser)


def add_format(parser: ArgumentParser) -> None:
    """Add the choice of how a report is printed."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html",
        help="write it as a page for browsers too: one file that loads nothing",
    )  # fmt: skip


def run(options: Namespace, out: Output) -> int:
    """Print the report."""
    from qompose.reporting.build_report import report
    from qompose.storage.artifact import read

    check_page(options.html, [options.file.resolve()])
    found = read(options.file)
    models = found if isinstance(found, dict) else {"": found}
    reports = {method: report(model) for method, model in models.items()}
    if options.html is not None:
        _save_pages(reports, options.html)
    if isinstance(found, dict) and options.json:
        out.json({method: one.to_dict() for method, one in reports.items()})
        return 0
    for method, one in reports.items():
        if method:
            out.text(f"method {method}:\n")
        print_report(one, options, out)
    return 0


def _save_pages(reports: Mapping[str, Report], page: Path) -> None:
    """Write the page of a model, or one for each of its methods, with the method in its name."""
    for method, found in reports.items():
        path = page.with_suffix(f".{method}{page.suffix}") if method else page
        found.save(path)
        say(f"wrote {path} ({path.stat().st_size:,} bytes)")


def check_page(page: Path | None, read: Collection[Path]) -> None:
    """Refuse a page that cannot be written, or would destroy a file that is read, before any work is done."""
    if page is None:
        return
    if page.suffix.lower() != ".html":
        raise UserError(f"--html {page} is no name of a page, which ends in .html")
    check_place(page, read)


def check_place(path: Path, read: Collection[Path]) -> None:
    """Refuse a file that cannot be written where it is to be, or that is read."""
    place = destination(path)
    if not place.parent.is_dir():
        raise UserError(f"{path} cannot be written: {place.parent} is no directory")
    if place in read:
        raise UserError(f"{path} would be overwritten, and is read: choose another --output")


def print_report(found: Report, options: Namespace, out: Output) -> None:
    """Print a report in the form that was asked for."""
    if options.json:
        out.json(found.to_dict())
    else:
        out.text(found.to_markdown() if options.markdown else found.to_text(out.width))
