# SPDX-License-Identifier: Apache-2.0
"""How tests run: in which order and process, property tests the same each time under tox."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._export.utils
import torch.export.decomp_utils
import torch.export.exported_program
import torch.utils._traceback
from hypothesis import settings
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.filters import props

from tests.logs import Listen, Records

settings.register_profile("free", deadline=None, print_blob=True)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("free")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has its background jobs ignore interrupts, and so would the processes that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(100_000, 50, 100)  # exports make graphs of many small objects, few of them garbage


def _looking_once(collect: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    """Have torch look up its thousands of operators once, and again when others were registered.

    Each decomposition has it do so for every namespace, a tenth of a second in all.
    """

    def collected() -> set[Any]:
        _look_up_once(tuple(torch._C._dispatch_get_all_op_names()))
        return collect()

    return collected


_look_up_once = cache(lambda names, look_up=torch._export.utils._materialize_cpp_cia_ops: look_up())
torch._export.utils._materialize_cpp_cia_ops = lambda: None
for user, collector in (
    (torch.export.exported_program, "_collect_all_valid_cia_ops"),
    (torch.export.decomp_utils, "_collect_all_valid_cia_ops"),
    # torch keeps what this one finds at first: without the operators, for all decompositions of a process
    (torch.export.decomp_utils, "_collect_all_valid_cia_ops_for_aten_namespace"),
):
    setattr(user, collector, _looking_once(getattr(user, collector)))


def _read_when_asked(frames: list[dict[str, Any]], skip: int) -> traceback.StackSummary:
    """Have the lines of a stack read when somebody asks for them: few do, and torch takes a stack of each
    node that it traces, a hundred frames below pytest."""
    return traceback.StackSummary(
        traceback.FrameSummary(each["filename"], each["line"], each["name"], lookup_line=False)
        for each in reversed(frames[skip:])
    )


torch.utils._traceback._extract_symbolized_tb = _read_when_asked

_PATTERNS = "executorch.exir.passes._quant_patterns_and_replacements"


def pytest_runtest_setup() -> None:
    """Have ExecuTorch trace its patterns of quantized operators once: it does for each method that it lowers,
    a fifth of what a small one takes."""
    if _PATTERNS in sys.modules:
        _tracing_once(sys.modules[_PATTERNS])


@cache
def _tracing_once(patterns: ModuleType) -> None:
    for kind in ("binary_ops", "reshape", "slice", "embedding_ops"):
        name = f"_get_{kind}_patterns_and_replacements"
        setattr(patterns, name, cache(getattr(patterns, name)))


ON_THE_RUNTIME = (
    "tests/xnnpack/",
    "tests/embedding/test_executorch.py",
    "tests/contracts/test_xnnpack.py",
    "tests/interop/",
)
"""Folders and files that use ExecuTorch, which takes 15 seconds to import and to lower a first program."""
OF_NATIVE_CODE = ("tests/x86_inductor/native/",)
"""The folder of tests that share one library of C++, which takes half a minute to compile."""
TOGETHER = {"runtime": ON_THE_RUNTIME, "native code": OF_NATIVE_CODE}
SLOW = (*ON_THE_RUNTIME, *OF_NATIVE_CODE, "tests/test_packaging.py", "tests/test_authoring.py")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file in one process where nobody asks for something else: fixtures of a module cost seconds.

    So are the files that share an import or a library, so that few processes make it.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrShared(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            shared = (name for name, files in TOGETHER.items() if nodeid.startswith(files))
            return next(shared, str(super()._split_scope(nodeid)))

    config.option.loadscopereorder = False  # in the order of `pytest_collection_modifyitems`
    return ByFileOrShared(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process waits for it at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections: with them each takes most of a second."""
    gc.collect()
    gc.freeze()


COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip what fails for want of a C++ compiler, where there is none."""
    report = yield
    if report.failed and COMPILER is None and call.excinfo and _wants_compiler(call.excinfo.value):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, "Skipped: needs a C++ compiler")
    return report


def _wants_compiler(error: BaseException | None) -> bool:
    from torch._inductor.exc import InvalidCxxCompiler

    while error is not None:
        if isinstance(error, InvalidCxxCompiler) or "InvalidCxxCompiler" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.fixture
def on_file(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """The plan that is on file for a test, as JSON: `pytest --snapshot-update` writes it anew."""
    left_out = props("anchor", "output", "selector", "inputs", "macs", "float_bytes", "depends_on")
    return snapshot.with_defaults(extension_class=JSONSnapshotExtension, exclude=left_out)


@pytest.fixture
def regen(request: pytest.FixtureRequest) -> bool:
    """Whether pages and the example are written anew rather than compared: `--snapshot-update`, too."""
    return bool(request.config.getoption("update_snapshots"))


@pytest.fixture(autouse=True, scope="module")
def seeded_module() -> None:
    """Fixtures of a module draw the same numbers, whichever modules ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or behind others."""
    torch.manual_seed(0)


@pytest.fixture
def logged() -> Iterator[Listen]:
    """Call it with a level and the name of a logger: what that logger and those below it log from then on."""
    undo: list[Callable[[], None]] = []

    def listen(level: int, name: str = "") -> Records:
        logger, records = logging.getLogger(name or None), Records()
        undo.append(lambda before=logger.level: logger.setLevel(before))  # type: ignore[misc]
        undo.append(lambda: logger.removeHandler(records))
        logger.setLevel(level)
        logger.addHandler(records)
        return records

    yield listen
    for step in reversed(undo):
        step()
