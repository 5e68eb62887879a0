# SPDX-License-Identifier: Apache-2.0
"""Behind a fence, code may do to the process what it likes: all is put back, and said."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import threading
import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qompose.interop.fence import fenced
from qompose.testing.effects import state


class Case:
    """A change, how it is said (without ", which was undone"), and how to see what it changed."""

    def __init__(
        self, change: Callable[[], object], said: str, probe: Callable[[], object]
    ) -> None:
        self.change, self.said, self.probe = change, said, probe


def flag(name: str, value: object) -> Case:
    """A case of a flag of torch, by its full name."""
    path, _, attribute = name.rpartition(".")
    owner: Any = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)

    def change() -> None:
        setattr(owner, attribute, value)

    return Case(change, f"set {name} to {value!r}", lambda: getattr(owner, attribute))


def precisions() -> list[object]:
    backends: Any = torch.backends
    owners = [backends, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn,
              backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]  # fmt: skip
    return [torch.get_float32_matmul_precision(), *(owner.fp32_precision for owner in owners)]


def an_engine() -> str:
    supported = torch.backends.quantized.supported_engines
    return next(engine for engine in supported if engine != torch.backends.quantized.engine)


def root_handlers() -> tuple[object, ...]:
    return tuple(logging.root.handlers), logging.root.level


NAME = "QOMPOSE_TEST_FENCE"
DYNAMO = logging.getLogger("torch._dynamo")
CASES = {
    **{
        name: flag(name, value)
        for name, value in {
            "torch.backends.mkldnn.enabled": False,
            "torch.backends.mkldnn.deterministic": True,
            "torch.backends.cudnn.enabled": False,
            "torch.backends.cudnn.benchmark": True,
            "torch.backends.cudnn.deterministic": True,
            "torch.backends.cudnn.allow_tf32": False,
            "torch.backends.quantized.engine": an_engine(),
            "torch.backends.fp32_precision": "ieee",
            "torch.backends.mkldnn.matmul.fp32_precision": "bf16",
            "torch.backends.mkldnn.conv.fp32_precision": "bf16",
            "torch.backends.mkldnn.rnn.fp32_precision": "bf16",
            "torch.backends.cuda.matmul.fp32_precision": "ieee",
            "torch.backends.cudnn.conv.fp32_precision": "ieee",
            "torch.backends.cudnn.rnn.fp32_precision": "ieee",
            "torch.utils.deterministic.fill_uninitialized_memory": False,
        }.items()
    },
    "default dtype": Case(
        lambda: torch.set_default_dtype(torch.float64),
        "set torch's default dtype to torch.float64",
        torch.get_default_dtype,
    ),
    "default device": Case(
        lambda: torch.set_default_device("meta"),
        "set torch's default device to device(type='meta')",
        lambda: (torch.get_default_device(), len(torch.overrides._get_current_function_mode_stack())),
    ),
    "grad mode": Case(
        lambda: torch.set_grad_enabled(False),
        "set torch's grad mode to False",
        torch.is_grad_enabled,
    ),
    "threads": Case(
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        f"set torch's number of threads to {torch.get_num_threads() + 1}",
        torch.get_num_threads,
    ),
    "deterministic, warnings only": Case(
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        "set torch's deterministic debug mode to 1",
        torch.get_deterministic_debug_mode,
    ),
    "matmul precision": Case(
        lambda: torch.set_float32_matmul_precision("high"),
        "set torch's float32 matmul precision to 'high'",
        precisions,
    ),
    "working directory": Case(lambda: os.chdir("/"), "set the working directory to '/'", Path.cwd),
    "recursion limit": Case(
        lambda: sys.setrecursionlimit(12345),
        "set the recursion limit to 12345",
        sys.getrecursionlimit,
    ),
    "added variable": Case(
        lambda: os.environ.update({NAME: "secret"}),
        f"set the environment variable {NAME}",
        lambda: dict(os.environ),
    ),
    "changed variable": Case(
        lambda: os.environ.update(PATH="secret"),
        "set the environment variable PATH",
        lambda: dict(os.environ),
    ),
    "removed variable": Case(
        lambda: os.environ.pop("PATH"),
        "removed the environment variable PATH",
        lambda: dict(os.environ),
    ),
    "extended sys.path": Case(
        lambda: sys.path.insert(0, "/nowhere"), "changed sys.path", lambda: (id(sys.path), *sys.path)
    ),
    "replaced sys.path": Case(
        lambda: setattr(sys, "path", ["/nowhere"]),
        "changed sys.path",
        lambda: (id(sys.path), *sys.path),
    ),
    "torch random": Case(
        lambda: torch.randn(2),
        "used the global random numbers of torch",
        lambda: torch.get_rng_state().tolist(),
    ),
    "python random": Case(
        random.random, "used the global random numbers of random", random.getstate
    ),
    "numpy random": Case(
        lambda: np.random.seed(3),
        "used the global random numbers of numpy",
        lambda: str(np.random.get_state()),
    ),
    "warnings filter": Case(
        lambda: warnings.simplefilter("ignore"),
        "changed the filters of warnings",
        lambda: (id(warnings.filters), *warnings.filters),
    ),
    "an entered catch_warnings": Case(
        lambda: warnings.catch_warnings(record=True).__enter__(),
        "changed the filters of warnings",
        lambda: (id(warnings.filters), *warnings.filters, warnings.showwarning),
    ),
    "root handler": Case(
        lambda: logging.root.addHandler(logging.NullHandler()),
        "changed handlers of the logger root",
        root_handlers,
    ),
    "root level": Case(
        lambda: logging.root.setLevel(3), "changed level of the logger root", root_handlers
    ),
    "level of torch's logger": Case(
        lambda: DYNAMO.setLevel(3),
        "changed level of the logger torch._dynamo",
        lambda: (DYNAMO.level, DYNAMO.isEnabledFor(4)),
    ),
    "disabled logger of torch": Case(
        lambda: (setattr(DYNAMO, "disabled", True), setattr(DYNAMO, "propagate", not DYNAMO.propagate)),
        "changed propagate, disabled of the logger torch._dynamo",
        lambda: (DYNAMO.propagate, DYNAMO.disabled),
    ),
    "logging.disable": Case(
        lambda: logging.disable(40),
        "called logging.disable(40)",
        lambda: logging.root.manager.disable,
    ),
    "replaced stdout": Case(
        lambda: setattr(sys, "stdout", io.StringIO()), "replaced sys.stdout", lambda: sys.stdout
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """No test here needs to clean up behind itself: the fence does, or the test has failed."""
    before = numeric_state()
    yield
    assert numeric_state() == before


def numeric_state() -> dict[str, str]:
    """What decides how tensors are computed, as another part of qompose lists it."""
    pytests = ("environment", "warnings filters", "handlers and level of the root logger")
    return {name: value for name, value in state().items() if name not in pytests}


class FailedError(Exception):
    """What code behind the fence raises."""


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_undone_and_said(name: str) -> None:
    case = CASES[name]
    before = case.probe()
    with fenced() as effects:
        case.change()
        assert case.probe() != before, "the case changes nothing"
        assert effects == []
    assert case.probe() == before
    assert f"{case.said}, which was undone" in effects
    with fenced() as again:
        pass
    assert again == []


@pytest.mark.parametrize("name", CASES)
def test_it_is_undone_where_the_code_raises(name: str) -> None:
    case = CASES[name]
    before = case.probe()
    with pytest.raises(FailedError), fenced():
        case.change()
        raise FailedError
    assert case.probe() == before


@settings(max_examples=25)
@given(st.lists(st.sampled_from(sorted(CASES)), min_size=2, max_size=6, unique=True))
def test_changes_together_are_all_undone(names: list[str]) -> None:
    before = [case.probe() for case in CASES.values()]
    with fenced():
        for name in names:
            CASES[name].change()
    assert [case.probe() for case in CASES.values()] == before


def test_where_nothing_happens_nothing_is_said() -> None:
    def look() -> None:
        with fenced() as effects:
            torch.tensor([1.0]).exp()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
        assert effects == []

    look()
    assert min(timeit.repeat(look, number=1, repeat=20)) < 0.005  # 0.3 ms on an idle machine


def test_the_users_own_settings_are_kept() -> None:
    """What is restored is what was set before, not what torch starts with."""
    torch.backends.mkldnn.enabled = False
    try:
        with fenced() as effects:
            torch.backends.mkldnn.enabled = True
        assert not torch.backends.mkldnn.enabled
        assert effects == ["set torch.backends.mkldnn.enabled to True, which was undone"]
    finally:
        torch.backends.mkldnn.enabled = True


def test_a_device_that_the_user_entered_stays_his_and_ends_with_his_block() -> None:
    with torch.device("meta"):
        with fenced():
            torch.set_default_device("cpu")
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "cpu"


def test_settings_that_cannot_be_read_are_left_alone() -> None:
    """Of a mix of the older and newer functions for precision torch refuses to tell the older's answer."""
    matmul: Any = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    matmul.fp32_precision = "ieee"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        for name, value in {
            "mkldnn": "bf16",
            "cuda": "ieee",
        }.items():  # by the latter, torch can tell
            with fenced() as effects:
                getattr(torch.backends, name).matmul.fp32_precision = value
            assert matmul.fp32_precision == "ieee"
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            said = f"set torch.backends.{name}.matmul.fp32_precision to {value!r}, which was undone"
            assert effects == [said]
    finally:
        matmul.fp32_precision = before
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_what_cannot_be_undone_is_said_and_the_rest_is_undone(tmp_path: Path) -> None:
    home, place = Path.cwd(), tmp_path / "place"
    place.mkdir()
    os.chdir(place)
    try:
        with fenced() as effects:
            os.chdir(tmp_path)
            place.rmdir()
            torch.backends.mkldnn.enabled = False
        assert torch.backends.mkldnn.enabled
        (said,) = (effect for effect in effects if "working directory" in effect)
        assert "which could not be undone: " in said and "place" in said
    finally:
        os.chdir(home)


def test_values_of_variables_are_not_told() -> None:
    with fenced() as effects:
        os.environ[NAME] = "a token"
    assert effects and "token" not in str(effects)


def test_one_thread_at_a_time_is_behind_a_fence() -> None:
    """Two that overlapped would each put back what the other had set."""
    order, inside = [], threading.Event()

    def other() -> None:
        inside.wait(10)
        with fenced():
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with fenced():
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]
    assert not isinstance(sys.stdout, type(None))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_any_way_out_restores(error: type[BaseException]) -> None:
    with pytest.raises(error), fenced():
        torch.backends.mkldnn.enabled = False
        raise error
    assert torch.backends.mkldnn.enabled
