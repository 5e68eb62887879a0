# SPDX-License-Identifier: Apache-2.0
"""`qompose report`: what happened to every operator of a saved model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from qompose.commands.output import Output

if TYPE_CHECKING:
    from qompose.ledger import Report

SUMMARY = "show what happened to every operator of a saved model"
DESCRIPTION = """\
Show the report of a model that qompose.save or `qompose quantize` wrote: who took which operator, and why the
rest is float. No backend needs to be installed for that, and no code of the file is run."""
EXAMPLES = """\
qompose report model.qompose
qompose report model.qompose --markdown > report.md"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the saved model")
    add_format(parser)


def add_format(parser: ArgumentParser) -> None:
    """Add the choice of how a report is printed."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")


def run(options: Namespace, out: Output) -> int:
    """Print the report."""
    from qompose.artefact import read
    from qompose.reporting import report

    found = read(options.file)
    if not isinstance(found, dict):
        print_report(report(found), options, out)
    elif options.json:
        out.json({method: report(model).to_dict() for method, model in found.items()})
    else:
        for method, model in found.items():
            out.text(f"method {method}:\n")
            print_report(report(model), options, out)
    return 0


def print_report(found: Report, options: Namespace, out: Output) -> None:
    """Print a report in the form that was asked for."""
    if options.json:
        out.json(found.to_dict())
    else:
        out.text(found.to_markdown() if options.markdown else found.to_text(out.width))
