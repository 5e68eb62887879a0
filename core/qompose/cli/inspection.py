# SPDX-License-Identifier: Apache-2.0
"""The commands that only look: `qompose backends`, `capabilities`, `report` and `env`."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, TYPE_CHECKING, Any

from importlib_metadata import PackageNotFoundError, distribution, version

from qompose.backend.discovery import (
    BROKEN,
    BackendInfo,
    Health,
    algorithms,
    backends,
    check_backend,
    damaged_packages,
    load_backend,
    names_nobody_offers,
    why_none,
)
from qompose.cli.command import (
    Command,
    Results,
    add_report_form,
    check_page,
    own_standard_output,
    print_report,
    say,
)
from qompose.console import counted
from qompose.errors import PluginError, UserError, near_names

if TYPE_CHECKING:
    from qompose.backend.capabilities import Capabilities
    from qompose.reporting.report_data import Report


SCHEMA = 1
"""The version of the form of what `qompose backends --json` and `qompose env --json` print."""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return seconds


def _add_backends_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="load each backend in a separate process"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="SECONDS",
        help="with --check: time limit for loading one backend (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def _list_backends(options: Namespace, results: Results) -> int:
    """Print the table; return 1 where something is wrong with a backend."""
    found = [*backends(), *algorithms()]
    rows = [info.to_dict() for info in found]
    if options.check:
        healths = check_apart(found, options.timeout)
        rows = [{**row, **h.to_dict()} for row, h in zip(rows, healths, strict=True)]
    for name in names_nobody_offers():
        say(f"QOMPOSE_PLUGINS names {name!r}, but no installed package provides it")
    for package in damaged_packages():
        say(f"{package}: its entry_points.txt is damaged, so its backends are unknown")
    if options.json:
        results.json({"schema": SCHEMA, "backends": rows})
        return int(any(row["problem"] for row in rows))
    if rows:
        _print_backends(rows, results)
    if not any(row["kind"] == "backend" for row in rows):
        results.text(why_none())
    return int(any(row["problem"] for row in rows))


def _print_backends(rows: list[dict[str, Any]], results: Results) -> None:
    from qompose.console import Table, as_text

    columns = ["name", "distribution", "version", "module"]
    columns += ["kind"] * any(row["kind"] != "backend" for row in rows)
    columns += [c for c in ("status", "problem") if any(row.get(c) for row in rows)]
    cells = tuple(tuple(row.get(column) or "" for column in columns) for row in rows)
    results.text(as_text([Table(tuple(columns), cells)], results.width).strip("\n"))
    for row in rows:
        for target, problem in row.get("targets", {}).items():
            if problem:
                results.text(f"{row['name']}: target {target} cannot be used here: {problem}")
    for name, target in _targets_nobody_brings(rows):
        results.text(f"{name}: no installed backend provides the target {target}")


def _targets_nobody_brings(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (backend, target) where kernels are for a runtime that no checked backend brings."""
    listed = [(row["name"], target) for row in rows for target in row.get("kernels_for", ())]
    if not listed:
        return  # without importing torch
    from qompose.backend.rule import TORCH

    brought = {TORCH, *(target for row in rows for target in row.get("targets", {}))}
    yield from (pair for pair in listed if pair[1] not in brought)


# The process finds modules where this one does; -c alone would put the working directory first.
_CHILD = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); "
    "from qompose.cli.inspection import answer; answer(*sys.argv[2:])"
)


_AT_ONCE = 4
"""How many processes check at a time: each imports torch."""


def check_apart(found: Sequence[BackendInfo], timeout: float) -> list[Health]:
    """Load each plugin in a process of its own, which it may end, crash or keep busy; return their health.

    Several are checked at a time. An error here, such as an interrupt, ends their processes.
    """
    healths: list[Health] = []
    for first in range(0, len(found), _AT_ONCE):
        with ExitStack() as stack:
            checks = []
            for info in found[first : first + _AT_ONCE]:
                out = stack.enter_context(TemporaryFile("w+", errors="replace"))
                error = stack.enter_context(TemporaryFile("w+", errors="replace"))
                checks.append(_Check.started(info, out, error, stack))
            healths += [check.health(timeout) for check in checks]
    return healths


@dataclass(frozen=True)
class _Check:
    """A process that loads a plugin, None where that is known to fail; and what it prints, in files.

    A pipe would be full before its turn to be read comes.
    """

    info: BackendInfo
    start: float
    process: subprocess.Popen[str] | None
    out: IO[str]
    error: IO[str]

    @classmethod
    def started(cls, info: BackendInfo, out: IO[str], error: IO[str], stack: ExitStack) -> _Check:
        """Start the process, which `stack` ends."""
        if info.problem is not None:
            return cls(info, monotonic(), None, out, error)
        key = (info.name, info.distribution, info.module, info.kind)
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, os.pathsep.join(sys.path), *key],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                text=True,
            )
        )
        stack.callback(process.kill)  # before it is waited for; one that has ended stays as it is
        return cls(info, monotonic(), process, out, error)

    def health(self, timeout: float) -> Health:
        """Wait for the process and return what it found."""
        if self.process is None:
            return Health(BROKEN, self.info.problem)
        try:
            code = self.process.wait(max(0.0, self.start + timeout - monotonic()))
        except subprocess.TimeoutExpired:
            return Health(BROKEN, f"loading it took longer than {timeout:g} s")
        for file in (self.out, self.error):
            file.seek(0)
        printed, said = self.out.read(), self.error.read()
        try:
            return Health(**json.loads(printed))
        except (ValueError, TypeError):
            last = (said.strip().splitlines() or ["no output"])[-1]
            return Health(BROKEN, f"loading it terminated the process {_how(code)}: {last}")


def _how(code: int) -> str:
    """Return how a process ended, in words."""
    names = {number.value: number.name for number in signal.Signals}
    return f"by signal {names[-code]}" if -code in names else f"with code {code}"


def answer(*key: str) -> None:
    """Print the health of one plugin as JSON, and what the plugin itself prints on standard error.

    Args:
        key: its name, distribution, module and kind.
    """
    results = Results(own_standard_output())
    (info,) = (
        i for i in (*backends(), *algorithms()) if (i.name, i.distribution, i.module, i.kind) == key
    )
    if info.kind == "backend":
        health = check_backend(info)
    else:
        from qompose.algorithms.interface import check_algorithm

        health = check_algorithm(info)
    results.json(health.to_dict())


BACKENDS = Command(
    summary="list the installed backends and algorithms",
    description="""\
List the installed backends and third-party algorithms. Only package metadata is read; nothing is imported.

With --check, load each one in a separate process and report problems: "broken" means that the package is
faulty, "unavailable here" that this machine lacks something. In both cases the exit code is 1.""",
    examples="""\
qompose backends
qompose backends --check
QOMPOSE_PLUGINS=my_chip,my_cpu qompose backends --json""",
    add_arguments=_add_backends_arguments,
    run=_list_backends,
)


def _add_capabilities_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("backend", nargs="*", metavar="BACKEND", help="names (default: all installed backends)")
    add("--target", help="only rows with a kernel on this target")
    add("--mode", choices=("static", "dynamic", "weight-only"), help="only rows with this mode")
    add("--config", help="only rows with this configuration")
    add("--operator", help="only patterns with this operator or module, such as conv2d or Conv2d")
    add(
        "--rule",
        help="only rows with this rule (names are the same in reports)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")


def _list_capabilities(options: Namespace, results: Results) -> int:
    """Print the rows; return 1 where a backend could not be asked."""
    from qompose.backend.capabilities import Capabilities, capability_rows

    found, problems = Capabilities(()), []
    names = options.backend or sorted({info.name for info in backends()})
    if not names:
        say(why_none())
    for name in dict.fromkeys(names):
        try:
            found += capability_rows(load_backend(name))
        except PluginError as error:
            problems.append(error)
    _check_choices(options, found)
    asked = {name: getattr(options, name) for name in _FACTS if getattr(options, name) is not None}
    rows = found.filter(**asked)
    if options.json:
        results.json(rows.to_dict())
    else:
        _print_capabilities(found, rows, options, results)
    for problem in problems:
        say(str(problem))
    return int(bool(problems))


_FACTS = ("target", "mode", "config", "rule", "operator")


def _check_choices(options: Namespace, found: Capabilities) -> None:
    from qompose.backend.pattern_question import is_operator

    for choice, known in (
        ("target", {target for row in found for target in row.targets}),
        ("config", {row.config for row in found}),
        ("rule", {row.rule for row in found}),
    ):
        _check_choice(choice, getattr(options, choice), known)
    if options.operator is not None and not is_operator(options.operator):
        calls = {call for row in found for variant in row.operators for call in variant}
        names = {call.removeprefix("aten.").rpartition(".")[0] for call in calls}
        _check_choice("operator", options.operator, names)


def _check_choice(choice: str, value: str | None, known: set[str]) -> None:
    """Refuse a name that no row has: the answer would be an empty table."""
    if value is not None and value not in known:
        raise UserError(
            f"no row has the {choice} {value!r}{near_names(value, known)}. Available: "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _print_capabilities(
    found: Capabilities, rows: Capabilities, options: Namespace, results: Results
) -> None:
    from qompose.console import as_text

    if not rows and options.operator is None:
        results.text("No matching rows.")
    elif options.markdown:
        results.text(rows.to_markdown())
    elif rows:
        results.show(rows)
    for line in _why_not(found, rows, options.operator):
        results.text(as_text([line], results.width))


def _why_not(found: Capabilities, rows: Capabilities, operator: str | None) -> Iterator[str]:
    """Yield why a backend has no pattern with an operator, and the configurations without one."""
    for source in found.sources if operator is not None else ():
        configs = dict.fromkeys(row.config for row in found if row.backend == source.backend)
        taken = {row.config for row in rows if row.backend == source.backend}
        without = [name for name in configs if name not in taken]
        if not taken:
            yield f"{source.backend}: {replace(found, sources=(source,)).supports(operator)}"
        elif without:
            yield f"{source.backend}: not supported by the configurations {'; '.join(without)}"


CAPABILITIES = Command(
    summary="list what backends can quantize",
    description="""\
List the patterns that backends quantize: one row for each rule and configuration of a backend, with the
kernel that runs it on each target. The rows come from the tables that are used to quantize and lower.""",
    examples="""\
qompose capabilities
qompose capabilities my_chip --operator conv2d
qompose capabilities my_chip --target torch --mode static
qompose capabilities my_chip my_cpu --markdown
qompose capabilities --json""",
    add_arguments=_add_capabilities_arguments,
    run=_list_capabilities,
)


def _add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a saved model")
    add_report_form(parser)


def _show_report(options: Namespace, results: Results) -> int:
    from qompose.reporting.build_report import report
    from qompose.storage.artifact import read

    check_page(options.html, [options.file.resolve()])
    found = read(options.file)
    models = found if isinstance(found, dict) else {"": found}
    reports = {method: report(model) for method, model in models.items()}
    if options.html is not None:
        _save_pages(reports, options.html)
    if isinstance(found, dict) and options.json:
        results.json({method: one.to_dict() for method, one in reports.items()})
        return 0
    for method, one in reports.items():
        if method:
            results.text(f"method {method}:\n")
        print_report(one, options, results)
    return 0


def _save_pages(reports: Mapping[str, Report], page: Path) -> None:
    """Write the page of a model, or one for each of its methods, with the method in its name."""
    for method, found in reports.items():
        path = page.with_suffix(f".{method}{page.suffix}") if method else page
        found.save(path)
        say(f"wrote {path} ({path.stat().st_size:,} bytes)")


REPORT = Command(
    summary="show what happened to every operator of a saved model",
    description="""\
Show the report of a model saved by qompose.save or `qompose quantize`: which backend claimed each operator,
and why the others stay in float. No backend needs to be installed, and no code in the file is run.""",
    examples="""\
qompose report model.qompose
qompose report model.qompose --markdown > report.md
qompose report model.qompose --html report.html""",
    add_arguments=_add_report_arguments,
    run=_show_report,
)


_SETTINGS = re.compile(r"(QOMPOSE_|TORCH|ATEN_|OMP_|MKL_|KMP_)\w+|CXX|\w+_MAX_CPU_ISA")
"""Environment variables that change what runs, or how fast."""
_REQUIREMENT = re.compile(r"[\w.-]+")


def _add_env_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _show_environment(options: Namespace, results: Results) -> int:
    found = facts()
    if options.json:
        results.json({"schema": SCHEMA, **found})
        return 0
    for name, value in found.items():
        if isinstance(value, Mapping):
            results.text(f"{name}:")
            results.text("".join(f"  {key}: {entry}\n" for key, entry in value.items()).rstrip())
        else:
            results.text(f"{name}: {value}")
    return 0


def facts() -> dict[str, Any]:
    """Return what the behaviour of quantized models depends on, as JSON data.

    `packages` are the installed distributions of qompose and of plugins, and what they require, optional
    requirements included; None is one that is not installed.
    """
    import torch

    plugins = {info.name: info for info in (*backends(), *algorithms())}
    threads = counted(torch.get_num_threads(), "thread")
    packages = _packages({"qompose", *(info.distribution for info in plugins.values())})
    packages["torch"] = str(torch.__version__)  # its metadata may leave out for which device it is
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "torch_uses": f"{torch.backends.cpu.get_cpu_capability()}, {threads}",
        "cores": os.cpu_count(),
        "plugins": {
            name: info.problem or f"{info.kind} of {info.distribution} {info.version}"
            for name, info in plugins.items()
        },
        "packages": packages,
        "settings": {k: v for k, v in sorted(os.environ.items()) if _SETTINGS.fullmatch(k)},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _packages(ours: set[str]) -> dict[str, str | None]:
    """Return the versions of distributions and of what they require."""
    required = {
        match.group().lower().replace("_", "-")
        for name in ours
        if _version(name) is not None
        for text in distribution(name).requires or ()
        if (match := _REQUIREMENT.match(text)) is not None
    }
    return {name: _version(name) for name in (*sorted(ours), *sorted(required - ours))}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


ENV = Command(
    "print versions, processor and backends for a bug report",
    "Print what quantized models depend on: the versions of Python, torch, qompose, its plugins "
    "and their requirements, the processor, the installed backends, and environment variables.",
    "qompose env\nqompose env --json",
    _add_env_arguments,
    _show_environment,
)
