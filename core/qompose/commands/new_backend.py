# SPDX-License-Identifier: Apache-2.0
"""`qompose new-backend`: write the project of a new backend."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from qompose.commands.output import Output

SUMMARY = "write the project of a new backend"
DESCRIPTION = """\
Write a pip package with a small backend that works, and its tests: one entry point, one rule table, its
kernels. It installs and passes its tests as it is; change it rule by rule."""
EXAMPLES = """\
qompose new-backend my_chip
qompose new-backend my_chip --directory ~/projects"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", metavar="NAME", help="what users will call the backend")
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="DIR",
        help="where the project's folder is made (default: here)",
    )  # fmt: skip


def run(options: Namespace, out: Output) -> int:
    """Write the project and print where it is."""
    from qompose.scaffolding import new_backend

    out.text(str(new_backend(options.name, options.directory)))
    return 0
