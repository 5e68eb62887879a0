# SPDX-License-Identifier: Apache-2.0
"""Run the zoo's models through every flow of every installed backend: what works, coverage and accuracy.

A run that crashes, hangs or takes too much memory is a row. Results are saved at once: the same command
resumes after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import zoo_table  # noqa: E402
from qompose.console import as_markdown, progress_bar  # noqa: E402
from zoo_flows import EXPORT, Flow, flows, usable  # noqa: E402
from zoo_peers import PEERS  # noqa: E402
from zoo_run import models  # noqa: E402
from zoo_state import ChangedError, State  # noqa: E402
from zoo_workers import Crew, Limits, Tasks, Worker, serve  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where every run of ours works, covers enough or says why; 1 otherwise."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.work:
        serve(options.zoo)
        return 0
    names = _matching(models(options.zoo), options.models)
    chosen, notes = _flows(options)
    if options.list:
        print(*names, "", *(flow.name for flow in chosen), *notes, sep="\n")
        return 0
    if not names or not chosen:
        parser.error(f"{len(names)} models and {len(chosen)} flows are chosen; --list shows all")
    try:
        state = State(
            options.state, mixed=options.mixed or bool(options.again), restart=options.restart
        )
    except (ChangedError, BlockingIOError) as error:
        parser.error(str(error))
    try:
        if not options.show:
            _measure(options, state, names, chosen)
        rows = state.chosen(names, (flow.name for flow in chosen))
    finally:
        state.close()
    for note in notes:
        print(f"{note}\n")
    _print(rows, chosen, options.layout, state.on)
    if options.json:
        _write(options.json, {"on": state.on, "notes": notes, "rows": rows})
    return int(any(_is_fault(row) for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    shell = "names, with * as a wildcard"
    add("--models", nargs="+", default=["*"], help=f"{shell} (default: all)")
    add(
        "--backends",
        nargs="+",
        default=["*"],
        help=f"{shell}; compositions are named `one + other` (default: all)",
    )
    add(
        "--schemes",
        nargs="+",
        default=["*"],
        help=f"configurations and modes, {shell} (default: all)",
    )
    add("--targets", nargs="+", default=["*"], help=f"{shell} (default: all)")
    add(
        "--first",
        action="store_true",
        help="only the first configuration of each mode of a backend",
    )
    add("--dynamic", action="store_true", help="also dynamic batches, for first configurations")
    add(
        "--peers",
        nargs="*",
        choices=[*PEERS],
        metavar="PEER",
        help=f"also run {', '.join(PEERS)}; without names, all of them",
    )
    add(
        "--zoo",
        default="zoo_models",
        help="module or file that lists the models as EVERY or ZOO (default: %(default)s)",
    )
    add(
        "--state",
        type=Path,
        default=ROOT / "zoo-state.jsonl",
        help="file of results so far (default: %(default)s)",
    )
    add("--restart", action="store_true", help="discard results so far")
    add("--mixed", action="store_true", help="keep results of other sources or versions")
    add(
        "--again",
        choices=["failed", "changed"],
        default="",
        help="measure these rows again and keep the others",
    )
    add("--show", action="store_true", help="only print results so far")
    add("--seconds", type=float, default=300, help="time limit of a run (default: %(default)s)")
    most = "memory limit of a run in MiB, on Linux (default: %(default)s)"
    add("--memory", type=int, default=6144, help=most)
    add("--jobs", type=int, default=1, help="parallel runs (default: %(default)s)")
    add(
        "--layout",
        choices=["rows", "models"],
        default="rows",
        help="print a line per run or per model (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="also write every figure and reason to this file")
    add("--list", action="store_true", help="only print the selected models and flows")
    add("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if _fits(name, patterns)]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _flows(options: argparse.Namespace) -> tuple[list[Flow], list[str]]:
    """The export, then ours, then peers: those change their process."""
    backends, notes = usable()
    chosen = [
        flow
        for flow in flows(backends)
        if _fits(flow.backend, options.backends)
        and _fits(flow.target, options.targets)
        and (options.dynamic or not flow.dynamic)
        and (flow.first or not options.first)
        and any(_fits(s, options.schemes) for s in (flow.mode, *(c for _, c in flow.members)))
    ]
    peers = [] if options.peers is None else options.peers or [*PEERS]
    return [Flow(), *chosen, *(Flow(peer=peer) for peer in peers)], notes


def _measure(
    options: argparse.Namespace, state: State, names: Sequence[str], chosen: Sequence[Flow]
) -> None:
    tasks = _tasks(options, state, names, chosen)
    command = [sys.executable, str(Path(__file__).resolve()), "--work", "--zoo", options.zoo]
    limits = Limits(options.seconds, options.memory << 20)
    watched = sys.stderr.isatty()
    with progress_bar(watched) as bar:
        task = bar.add_task("", total=sum(len(flows) for _, flows in tasks))

        def begun(model: str, flow: Flow) -> None:
            bar.update(task, description=f"{model}, {flow.name}")

        def done(model: str, flow: Flow, row: dict[str, Any]) -> None:
            state.add(model, flow.name, {**row, "kind": "peer" if flow.peer else "ours"})
            bar.advance(task)
            if not watched:
                progress = bar.tasks[0]
                said = (
                    "works" if row["works"] else f"fails in {row['stage']}: {row['error'][:100]!r}"
                )
                print(f"{progress.completed:.0f}/{progress.total:.0f} {model}, {flow.name}: {said}",
                      file=sys.stderr, flush=True)  # fmt: skip

        def settled(model: str, flow: Flow) -> dict[str, Any] | None:
            return _as_in_export(state, model, flow)

        Crew(tasks, settled, begun, done).run(lambda: Worker(command, limits), options.jobs)


def _as_in_export(state: State, model: str, flow: Flow) -> dict[str, Any] | None:
    """The row of a model that no flow can have, since it is not even built or exported."""
    export = state.rows.get((model, EXPORT))
    if flow.name == EXPORT or export is None or export["works"]:
        return None
    return {**export, "error": f"as without any flow: {export['error']}", "seconds": {}}


def _tasks(
    options: argparse.Namespace, state: State, names: Sequence[str], chosen: Sequence[Flow]
) -> Tasks:
    zoo, tasks = models(options.zoo), []
    for peer in dict.fromkeys(flow.peer for flow in chosen):
        for name in names:
            wanted = [
                flow
                for flow in chosen
                if flow.peer == peer and not state.has(name, flow.name, options.again)
                and not (flow.dynamic and zoo[name].dynamic_shapes is None)
            ]  # fmt: skip
            if wanted:
                tasks.append((name, wanted))
    return tasks


def _print(
    rows: list[dict[str, Any]], chosen: Sequence[Flow], layout: str, on: dict[str, str]
) -> None:
    table = zoo_table.matrix(rows, chosen) if layout == "models" else zoo_table.long_table(rows)
    parts = {
        "Models": table,
        "Summary": zoo_table.summary(rows, chosen),
        "Failures": zoo_table.failures(rows),
        "Reasons for less coverage": zoo_table.reasons(rows),
        "Errors to look at": zoo_table.suspects(rows),
    }
    for title, part in parts.items():
        print(as_markdown([f"## {title}", "", part if part.rows else "None."]).rstrip(), end="\n\n")
    print(json.dumps(on))
    if others := sum(row["on"] != on for row in rows):
        print(f"\n{others} of {len(rows)} rows were measured on other sources or versions.")


def _is_fault(row: dict[str, Any]) -> bool:
    if row["kind"] == "peer" or row["flow"] == EXPORT:
        return False
    part = row.get("coverage")
    unnamed = part is not None and part < zoo_table.ENOUGH and bool(row["unnamed"])
    return unnamed or not row["works"]


def _write(path: Path, data: Any) -> None:
    """All of it, or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
