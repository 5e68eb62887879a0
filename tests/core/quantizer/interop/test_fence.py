# SPDX-License-Identifier: Apache-2.0
"""Behind a fence, code may do to the process what it likes: all is put back, and said."""

from __future__ import annotations

import os
import sys
import threading
import timeit
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.quantizer.interop.process_state import fenced
from qompose.testing.checks_behavior import state

from tests.core.quantizer.interop.disturbances import CASES, NAME


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
