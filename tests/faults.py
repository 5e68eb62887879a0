# SPDX-License-Identifier: Apache-2.0
"""How many one-line faults the tests catch: faults drawn by seed on lines that tests cover.

    python tests/faults.py --record                # once: which test covers which line
    python tests/faults.py --seed 1 --count 60     # draw, try, print what was caught
    python tests/faults.py --faults drawn.json     # try the faults of an earlier run again

Faults are made in a copy of the checkout. cosmic-ray runs one command for every fault, mutmut has no
operators of one's own, and neither finds a fault again whose function has moved to another file.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCES = ("core/qompose", "plugins/*/qompose_*")

# Faults that change nothing a test could see: their key, printed with each survivor, and the reason.
# Where this file is a plugin of pytest, it stands in a copy of the checkout and needs none.
_FILE = Path(__file__).with_name("equivalent_faults.json")
EQUIVALENT: dict[str, str] = json.loads(_FILE.read_text()) if _FILE.is_file() else {}

# What stands in place of a decorator of functools, and answers every call with the first result.
FIRST = "(lambda f, kept=[]: lambda *a, **k: (kept or kept.append(f(*a, **k)) or kept)[0])"
PROPERTY = f"(lambda f: property({FIRST}(f)))"
ALWAYS_HIT = {"cache": FIRST, "lru_cache": FIRST, "cached_property": PROPERTY}
BOUNDS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
AXIS = re.compile("(ch_|channel_)?axis|dim[01]?")
WITH_AXIS = re.compile(
    "a(rg)?(max|min)|cumsum|flatten|gather|index_select|mean|movedim|narrow|select|size|softmax|sort"
    "|(un)?squeeze|sum|transpose|unbind"
)
NO_ORDER = re.compile("isinstance|issubclass|[gsh][et][ta]attr|cast|max|min")
NO_NUMBER = re.compile("list|tuple|(frozen)?set|sorted|reversed|str")
CHECK = re.compile("_*(check|require|ensure|validate|verify|refuse|reject|insist)")
REFRESH = re.compile("_*(clear|recompile|invalidate|forget|cache_clear)$")
KEY = re.compile("(^|_)(key|memo|cache|seen|fingerprint)($|_)")
PLAIN = (ast.Name, ast.Attribute, ast.Subscript)

Code = Callable[[ast.AST], str]  # the text of a node, "" if it goes over lines
Changes = Iterator[tuple[ast.expr | ast.stmt, str]]  # a node, and what stands there instead


def last_name(node: ast.AST) -> str:
    """The name that a call, a decorator or the target of an assignment ends in."""
    match node:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
        case ast.Call(inner) | ast.Subscript(inner):
            return last_name(inner)
    return ""


def number(node: ast.expr) -> bool:
    """Whether it may be a number: the other sign of a list or a set is no more than a type error."""
    match node:
        case ast.Call() | ast.Name() | ast.Attribute() | ast.Subscript():
            return not NO_NUMBER.fullmatch(last_name(node))
        case ast.Constant(value):
            return isinstance(value, int | float)
    return isinstance(node, ast.BinOp | ast.UnaryOp)


def between(
    node: ast.expr, left: ast.expr, right: ast.expr, code: Code, swap: dict[str, str]
) -> Changes:
    """Another operator between two operands of `node`."""
    text, start = code(node), (left.end_col_offset or 0) - node.col_offset
    middle = text[start : right.col_offset - node.col_offset]
    for old, new in swap.items():
        if old in middle:
            yield node, text[:start] + middle.replace(old, new) + text[start + len(middle) :]
            return


def sign(node: ast.AST, code: Code) -> Changes:
    """Plus for minus, minus for plus, and a minus dropped."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            if number(left) and number(right):
                yield from between(node, left, right, code, {"+": "-", "-": "+"})
        case ast.AugAssign(target, ast.Add() | ast.Sub(), value) if number(value):
            operator = "-=" if isinstance(node.op, ast.Add) else "+="
            yield node, f"{code(target)} {operator} {code(value)}"
        case ast.UnaryOp(ast.USub(), ast.Name() | ast.Attribute() | ast.Call() as operand):
            yield node, code(operand)


def axis(node: ast.AST, code: Code) -> Changes:
    """Another axis of a shape, in a keyword or in a method's first number."""
    axes: list[ast.expr] = []
    match node:
        case ast.Subscript(ast.Attribute(attr="shape"), index):
            axes = [index]
        case ast.Call(function, arguments, keywords):
            axes = [k.value for k in keywords if AXIS.fullmatch(k.arg or "")]
            if isinstance(function, ast.Attribute) and WITH_AXIS.fullmatch(function.attr):
                axes += [n for n in arguments if re.fullmatch(r"-?\d+", code(n))][:1]
    for axis in axes:
        if re.fullmatch(r"-?\d+", code(axis)):
            value = int(code(axis))
            yield axis, str({0: -1, 1: 0, -1: 0}.get(value, value - 1))
        elif isinstance(axis, ast.Name | ast.Attribute):
            yield axis, f"{code(axis)} - 1"


def bound(node: ast.AST, code: Code) -> Changes:
    """A bound that belongs where it did not, or no longer does."""
    if isinstance(node, ast.Compare):
        sides = itertools.pairwise([node.left, *node.comparators])
        for (left, right), operator in zip(sides, node.ops, strict=True):
            if type(operator) in BOUNDS:
                yield from between(node, left, right, code, dict([BOUNDS[type(operator)]]))


def check(node: ast.AST, code: Code) -> Changes:
    """A check that never fails."""
    match node:
        case ast.If(test, [*_, ast.Raise()]) if ":=" not in code(test):
            yield test, "False"
        case ast.Expr(ast.Call(called)) if CHECK.match(last_name(called)):
            yield node, "pass"


def order(node: ast.AST, code: Code) -> Changes:
    """Two arguments in each other's place."""
    if isinstance(node, ast.Call) and not NO_ORDER.fullmatch(last_name(node.func)):
        for left, right in itertools.pairwise(node.args):
            if isinstance(left, PLAIN) and isinstance(right, PLAIN) and code(left) != code(right):
                start = left.col_offset - node.col_offset
                end = start + (right.end_col_offset or 0) - left.col_offset
                swapped = f"{code(right)}, {code(left)}"
                yield node, code(node)[:start] + swapped + code(node)[end:]


def cache(node: ast.AST, code: Code) -> Changes:
    """A cache that always hits, one that is not cleared, a key without a part."""
    keys: list[ast.expr | None] = []
    match node:
        case ast.FunctionDef(name, args=taken, body=[*_, last], decorator_list=decorators):
            for decorator in decorators if taken.args else ():  # without, all calls are alike
                if new := ALWAYS_HIT.get(last_name(decorator)):
                    yield decorator, new
            keys = [last.value] if isinstance(last, ast.Return) and KEY.search(name) else []
        case ast.Expr(ast.Call(called)) if REFRESH.match(last_name(called)):
            yield node, "pass"
        case ast.Assign([target], value) if KEY.search(last_name(target)):
            keys = [value]
        case ast.Call(ast.Attribute(attr="setdefault"), [key, *_]):
            keys = [key]
    for tuple_ in (key for key in keys if isinstance(key, ast.Tuple)):
        for dropped in tuple_.elts:
            yield tuple_, f"({''.join(f'{code(n)}, ' for n in tuple_.elts if n is not dropped)})"


def error(node: ast.AST, code: Code) -> Changes:
    """An error that is caught and goes no further; a `raise` over lines stays and is not reached."""
    if isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise):
        yield node.body[-1], "pass" if code(node.body[-1]) else "while False: raise"


KINDS = {rule.__name__: rule for rule in (sign, axis, bound, check, order, cache, error)}


@dataclass(frozen=True)
class Fault:
    """One changed line. The first of `lines` that any test covers says which tests are run."""

    kind: str
    file: str
    function: str
    line: int
    before: str
    after: str
    lines: tuple[int, ...]

    @property
    def text(self) -> tuple[str, ...]:
        """What stays of a fault when its function moves to another file."""
        return (self.kind, self.function.split(".")[-1], self.before.strip(), self.after.strip())

    @property
    def key(self) -> str:
        """A short name for `EQUIVALENT` that outlives a move."""
        return hashlib.sha256(repr(self.text).encode()).hexdigest()[:10]


def faults_in(file: str, text: str) -> list[Fault]:
    """Every fault that can be made in the functions of a file."""
    rows = text.encode().decode("latin-1").split("\n")  # a column of ast counts bytes
    faults = []

    def code(node: ast.AST) -> str:
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        return rows[line - 1][node.col_offset : node.end_col_offset] if line == end else ""  # type: ignore[attr-defined]

    def walk(node: ast.AST, names: tuple[str, ...], inside: bool, line: int) -> None:
        line = node.lineno if isinstance(node, ast.stmt) else line
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names, inside = (*names, node.name), inside or isinstance(node, ast.FunctionDef)
        for kind, rule in KINDS.items() if inside else ():
            for place, new in rule(node, code):
                if code(place) or isinstance(place, ast.Raise):
                    row, start = rows[place.lineno - 1], place.col_offset
                    end = start + len(code(place) or "raise")
                    pair = row, row[:start] + new + row[end:]
                    before, after = (text.encode("latin-1").decode() for text in pair)
                    # A decorator is executed by an import: the last statement tells which tests call.
                    lines: tuple[int, ...] = (place.lineno, line)
                    if isinstance(node, ast.FunctionDef) and place in node.decorator_list:
                        lines = (node.body[-1].lineno,)
                    name = ".".join(names)
                    faults.append(Fault(kind, file, name, place.lineno, before, after, lines))
        for child in ast.iter_child_nodes(node):
            walk(child, names, inside, line)

    walk(ast.parse(text), (), False, 0)
    return faults


def sources(tree: Path) -> dict[str, str]:
    """Every source of core and the plugins: its path and its text."""
    folders = sorted(folder for pattern in SOURCES for folder in tree.glob(pattern))
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return {path.relative_to(tree).as_posix(): path.read_text() for path in files}


NOTES: dict[str, tuple[float, str]] = {}  # under pytest, of which this file is a plugin, too


def pytest_runtest_logreport(report: Any) -> None:
    """Note a test's seconds, and its outcome if it is another than "passed"."""
    seconds, outcome = NOTES.get(report.nodeid, (0.0, "passed"))
    outcome = outcome if report.outcome == "passed" else report.outcome
    NOTES[report.nodeid] = (seconds + report.duration, outcome)


def pytest_sessionfinish() -> None:
    """Write the notes where the script reads them; of several processes the one that has them all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        Path("notes.json").write_text(json.dumps(NOTES))


class Copy:
    """A copy of the checkout, and a pytest that imports the sources from there."""

    def __init__(self, tree: Path, folder: Path) -> None:
        ignored = shutil.ignore_patterns(".*", "build", "__pycache__")
        self.folder = Path(shutil.copytree(tree, folder / "tree", ignore=ignored))
        shutil.copy(__file__, self.folder / "faults_plugin.py")
        paths = [self.folder] + [p.parent for s in SOURCES for p in self.folder.glob(s)]
        self.environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths))}
        command = [sys.executable, "-c", "import qompose; print(qompose.__file__)"]
        where = subprocess.check_output(command, env=self.environment, text=True)
        if not where.startswith(str(self.folder)):
            sys.exit(f"expected the copy's sources to be imported, got {where}")

    def pytest(self, tests: list[str], *options: str, limit: float = 3600) -> tuple[int, Any]:
        """pytest's exit code, negative after `limit` seconds, and what the plugin noted."""
        (self.folder / "chosen").write_text("\n".join(tests))
        (self.folder / "notes.json").write_text("{}")
        limited = ["timeout", "-s", "KILL", str(limit), sys.executable, "-m", "pytest", "@chosen"]
        command = [*limited, "-q", "-p", "faults_plugin", "--hypothesis-profile", "repeatable"]
        with (self.folder / "log").open("w") as log:
            code = subprocess.call(
                [*command, *options], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        return code, json.loads((self.folder / "notes.json").read_text())


class Map:
    """Which tests cover which lines, in a folder: coverage.py's files, and what is known of the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, folder / "tests.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Any] = {"tests": {}, "files": [], "sources": {}}
        if self.index.exists():
            self.known = json.loads(self.index.read_text())

    def record(self, copy: Copy, folders: list[str], batch: int = 80) -> None:
        """Run the test files that are not in the map yet under coverage.py, a batch at a time."""
        now = sources(copy.folder)
        if self.known["sources"] not in ({}, now):
            sys.exit(
                f"the sources have changed since {self.folder} was begun: delete it to record anew"
            )
        found = [
            path for folder in folders for path in sorted((copy.folder / folder).rglob("test_*.py"))
        ]
        names = [path.relative_to(copy.folder).as_posix() for path in found]
        missing = [name for name in names if name not in self.known["files"]]
        measured = [
            f"--cov={folder}" for pattern in SOURCES for folder in copy.folder.glob(pattern)
        ]
        for start in range(0, len(missing), batch):
            files, began = missing[start : start + batch], time.monotonic()
            code, notes = copy.pytest(
                files, "-n2", "--cov-context=test", "--cov-report=", *measured
            )
            if not notes:
                sys.exit(f"pytest ended with {code}:\n{(copy.folder / 'log').read_text()[-2000:]}")
            shutil.move(
                copy.folder / ".coverage", self.folder / f"{len(self.known['files'])}.coverage"
            )
            self.known["sources"] = now
            self.known["tests"].update(notes)
            self.known["files"] += files
            self.index.write_text(json.dumps(self.known))
            done, seconds = (
                f"{start + len(files)} of {len(missing)} files",
                time.monotonic() - began,
            )
            print(f"{done}: {len(notes)} tests in {seconds:.0f} s, exit code {code}", flush=True)

    def read(self, tree: Path) -> dict[tuple[str, int], set[str]]:
        """The tests that passed and cover a line; sources changed since are left out."""
        import coverage

        now, recorded = sources(tree), self.known["sources"]
        same = [name for name, text in now.items() if recorded.get(name) == text]
        print(f"{len(now) - len(same)} of {len(now)} sources changed since the map was recorded")
        of_file: dict[str, set[str]] = defaultdict(set)
        covering: dict[tuple[str, int], set[str]] = defaultdict(set)
        for test, (_, outcome) in self.known["tests"].items():
            of_file[test.partition("::")[0]] |= {test} if outcome == "passed" else set()
        for path in sorted(self.folder.glob("*.coverage")):
            data = coverage.CoverageData(str(path))
            data.read()
            for measured in data.measured_files():
                for name in (n for n in same if measured.endswith("/" + n)):
                    for line, contexts in data.contexts_by_lineno(measured).items():
                        for test, _, phase in (context.rpartition("|") for context in contexts):
                            group = of_file[test.partition("::")[0]]
                            # A fixture of the module serves all its tests.
                            covering[name, line] |= group if phase == "setup" else group & {test}
        return covering


@dataclass
class Result:
    """What became of a fault: one that hangs, or breaks pytest itself, is caught, too."""

    fault: Fault
    outcome: str = "not tried"  # caught, hangs, breaks; survived; equivalent, gone, uncovered
    by: str = ""
    run: int = 0
    covering: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        fault, reason = self.fault, EQUIVALENT.get(self.fault.key, "")
        head = f"{self.outcome:10} {fault.kind:5} {fault.file}:{fault.line} {fault.function}: "
        head += f"{self.run} of {self.covering} tests, {self.seconds:.0f} s {self.by}\n"
        return f"{head}    - {fault.before.strip()}\n    + {fault.after.strip()}  # {fault.key} {reason}"


class Trials:
    """Tries faults in a copy of the checkout."""

    def __init__(self, copy: Copy, recorded: Map, budget: float) -> None:
        self.copy, self.budget = copy, budget
        self.seconds = {test: seconds for test, (seconds, _) in recorded.known["tests"].items()}
        self.lines = recorded.read(copy.folder)
        self.wrong: set[str] = set()  # tests that fail without a fault, too

    def covering(self, fault: Fault) -> set[str]:
        """The tests that cover it."""
        lines = (self.lines.get((fault.file, line), set()) for line in fault.lines)
        return next(filter(None, lines), set()) - self.wrong

    def choose(self, tests: set[str]) -> list[str]:
        """As many as fit the budget: each file's quickest, then each one's second; a file's together."""
        ranked: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            ranked[test.partition("::")[0]].append(test)
        rounds = itertools.zip_longest(*ranked.values())
        order = [test for tests in rounds for test in tests if test is not None]
        total = itertools.accumulate(self.seconds[test] for test in order)
        count = sum(seconds < self.budget for seconds in total)
        files = list(ranked)
        return sorted(order[: max(count, 1)], key=lambda t: files.index(t.partition("::")[0]))

    def attempt(self, fault: Fault) -> Result:
        """Make the fault, run the tests that cover it, mend it."""
        tests = self.covering(fault)
        if not tests or fault.key in EQUIVALENT:
            return Result(fault, "equivalent" if tests else "uncovered")
        chosen, began = self.choose(tests), time.monotonic()
        path = self.copy.folder / fault.file
        source, times = path.read_text(), path.stat()
        rows = source.split("\n")
        rows[fault.line - 1] = fault.after
        try:
            path.write_text("\n".join(rows))
            limit = 120 + 5 * sum(self.seconds[test] for test in chosen)
            code, notes = self.copy.pytest(chosen, "-x", limit=limit)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # for what is compiled of it
        by = next((test for test, (_, outcome) in notes.items() if outcome == "failed"), "")
        words = {0: "survived", 137: "hangs", -9: "hangs"}  # the last two: killed
        outcome = words.get(code, "caught" if by else "breaks")
        return Result(fault, outcome, by, len(chosen), len(tests), time.monotonic() - began)

    def confirm(self, results: list[Result]) -> list[Result]:
        """Try once more what was caught by a test that fails without the fault, too."""
        tests = sorted({result.by for result in results if result.by})
        notes = self.copy.pytest(tests)[1] if tests else {}
        self.wrong = {test for test in tests if notes.get(test, (0, ""))[1] != "passed"}
        return [self.attempt(r.fault) if r.by in self.wrong else r for r in results]


def draw(faults: list[Fault], seed: int, count: int) -> list[Fault]:
    """As many of each kind as can be, `count` in all."""
    piles = [[fault for fault in faults if fault.kind == kind] for kind in KINDS]
    for kind, pile in zip(KINDS, piles, strict=True):
        random.Random(f"{seed} {kind}").shuffle(pile)
    rounds = itertools.zip_longest(*piles)
    return [fault for faults in rounds for fault in faults if fault is not None][:count]


def find(old: Fault, faults: list[Fault]) -> Fault | None:
    """The fault of the same text, in the class of the same name if there are several."""
    same = [fault for fault in faults if fault.text == old.text]
    return min(same, key=lambda f: f.function != old.function, default=None)


def table(results: list[Result]) -> str:
    """Caught of tried, by kind."""
    rows = [f"{'kind':8} tried caught   rate"]
    for kind in (*KINDS, "all"):
        outcomes = Counter(r.outcome for r in results if kind in (r.fault.kind, "all"))
        caught = sum(outcomes[word] for word in ("caught", "hangs", "breaks"))
        tried = caught + outcomes["survived"]
        rows += [f"{kind:8} {tried:5} {caught:6} {caught / max(tried, 1):6.1%}"]
    return "\n".join([*rows, f"of them {dict(outcomes)}"])


def attempt(args: argparse.Namespace, trials: Trials) -> None:
    """Draw faults or find an earlier run's again, try them, print what became of them."""
    all_faults = [
        f for name, text in sources(trials.copy.folder).items() for f in faults_in(name, text)
    ]
    if args.faults:
        read = [Fault(**result["fault"]) for result in json.loads(args.faults.read_text())]
        chosen = [(fault, find(fault, all_faults)) for fault in read]
    else:
        covered = [f for f in all_faults if f.file.startswith(args.under) and trials.covering(f)]
        print("on covered lines:", dict(Counter(fault.kind for fault in covered)))
        chosen = [(fault, fault) for fault in draw(covered, args.seed, args.count)]
    results = [Result(old) for old, _ in chosen]
    for number, (old, new) in enumerate(chosen):
        results[number] = trials.attempt(new) if new else Result(old, "gone")
        print(results[number], flush=True)
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    results = trials.confirm(results)
    args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(f"tests that fail without a fault: {sorted(trials.wrong)}\n{table(results)}")


def main() -> None:
    """Record, draw or replay."""
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=here, help="the checkout (this one)")
    parser.add_argument(
        "--map", type=Path, default=here / ".tox" / "faults", help="the map's folder"
    )
    parser.add_argument(
        "--record", action="store_true", help="record test files not in the map yet"
    )
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--under", default="", help="only sources under this path, such as core")
    parser.add_argument("--faults", type=Path, help="try the faults in this file again")
    parser.add_argument(
        "--json", type=Path, default=Path(os.devnull), help="where to write the outcomes"
    )
    parser.add_argument("--budget", type=float, default=300, help="seconds of tests for a fault")
    args = parser.parse_args()
    recorded = Map(args.map)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(args.tree.resolve(), Path(folder))
        if args.record or not recorded.known["tests"]:
            recorded.record(copy, args.tests)
        if not args.record:
            attempt(args, Trials(copy, recorded, args.budget))


if __name__ == "__main__":
    main()
