# SPDX-License-Identifier: Apache-2.0
"""`qompose capabilities`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from qompose.backend.discovery import backends, why_none
from qompose.cli.output import Output, say
from qompose.errors import PluginError, UserError, near_names

if TYPE_CHECKING:
    from qompose.backend.capabilities import Capabilities


SUMMARY = "list what backends can do"
DESCRIPTION = """\
List the patterns that backends quantize: a row for each of a backend's rules under each of its
configurations, with the kernel that runs it on each target. The rows come from the tables that quantize and
lower."""
EXAMPLES = """\
qompose capabilities
qompose capabilities my_chip --target torch --mode static
qompose capabilities my_chip my_cpu --markdown
qompose capabilities --json"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("backend", nargs="*", metavar="BACKEND", help="names (default: all installed backends)")
    add("--target", help="only what has a kernel on this target")
    add("--mode", choices=("static", "dynamic", "weight-only"), help="only this mode")
    add("--config", help="only this configuration")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")


def run(options: Namespace, out: Output) -> int:
    """Print the rows; return 1 where a backend could not be asked."""
    from qompose.backend.capabilities import Capabilities, capability_rows
    from qompose.backend.discovery import load_backend

    found, problems = Capabilities(()), []
    names = options.backend or sorted({info.name for info in backends()})
    if not names:
        say(why_none())
    for name in dict.fromkeys(names):
        try:
            found += capability_rows(load_backend(name))
        except PluginError as error:
            problems.append(error)
    for choice, known in (
        ("target", {target for row in found for target in row.targets}),
        ("config", {row.config for row in found}),
    ):
        _check(choice, getattr(options, choice), known)
    facts = {choice: getattr(options, choice) for choice in ("target", "mode", "config")}
    rows = found.filter(**{choice: value for choice, value in facts.items() if value is not None})
    if options.json:
        out.json(rows.to_dict())
    else:
        _print(rows, options, out)
    for problem in problems:
        say(str(problem))
    return int(bool(problems))


def _check(choice: str, value: str | None, known: set[str]) -> None:
    """Refuse a name that no row has: the answer would be an empty table."""
    if value is not None and value not in known:
        raise UserError(
            f"no row has the {choice} {value!r}{near_names(value, known)}; there are "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _print(rows: Capabilities, options: Namespace, out: Output) -> None:
    from qompose.console import as_markdown, as_text

    if not rows:
        out.text("No row.")
        return
    blocks = rows.blocks()
    text = as_markdown(blocks) if options.markdown else as_text(blocks, out.width)
    out.text(text.strip("\n"))
