# SPDX-License-Identifier: Apache-2.0
"""What a backend must leave alone: the state of the process it is imported into and used in."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import torch

from qompose.lowering import TORCH_TARGET
from qompose.testing.agreeing import matches_reference
from qompose.testing.failures import Blocked, ContractError, NotApplicable
from qompose.testing.suite import Suite
from qompose.testing.trials import Trial, outputs


def state() -> dict[str, str]:
    """Return what is global in a process and must not be changed in passing, as text."""
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "grad mode": str(torch.is_grad_enabled()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "number of threads": str(torch.get_num_threads()),
        "quantized engine": str(torch.backends.quantized.engine),
        "torch.backends.mkldnn": str(torch.backends.mkldnn.enabled),
        "random numbers": str(torch.random.get_rng_state().sum().item()),
        "warnings filters": str([(f[0], str(f[1]), str(f[2])) for f in warnings.filters]),
        "handlers and level of the root logger": f"{logging.root.handlers} {logging.root.level}",
        "working directory": str(os.getcwd()),  # noqa: PTH109 - as it is, not resolved
        "environment": str(sorted(os.environ.items())),
    }


def changes(action: Callable[[], object]) -> list[str]:
    """Return what an action changes of the process's state, and what it prints, as sentences."""
    before, printed = state(), io.StringIO()
    with redirect_stdout(printed):
        action()
    after = state()
    found = [
        f"{name} was {_cut(before[name])} and is {_cut(after[name])}"
        for name in before
        if before[name] != after[name]
    ]
    return [*found, *([f"it prints {_cut(printed.getvalue())!r}"] if printed.getvalue() else [])]


def _cut(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]}..."


_IMPORT = """
import json, sys
import torch, qompose
from qompose import *
from qompose.testing.effects import changes
print(json.dumps(changes(lambda: qompose.load_backend(sys.argv[1]))))
"""


def imports_cleanly(suite: Suite) -> None:
    """Importing the backend changes nothing in the process."""
    source = suite.source
    assert isinstance(source, str)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, source], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Blocked("test_loads", f"backend {source!r} in a process of its own: {done.stderr}")
    _expect_nothing(f"backend {source!r}, when it is imported", json.loads(done.stdout))


@contextmanager
def _defaults() -> Iterator[None]:
    """Set what torch starts with, so that a setting which was made before is seen to be made again."""
    before = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
    _set(torch.float32, True, False, "highest")
    try:
        yield
    finally:
        _set(*before)


def _set(dtype: torch.dtype, grad: bool, deterministic: bool, precision: str) -> None:
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)


def works_cleanly(suite: Suite) -> None:
    """Preparing, converting, lowering and running a model changes nothing in the process."""
    rows = list(_sound_rows(suite))
    if not rows:
        raise NotApplicable("no row lowers")

    def use() -> None:
        for trial, target in rows:
            fresh = Trial(trial.terms)
            outputs(fresh.lowered(target), fresh.batches("calibration", 1)[0])

    use()  # what is only loaded when it is first used is loaded
    with _defaults():
        found = changes(use)
    _expect_nothing(f"backend {suite.backend.name!r}, when it is used", found)


def _sound_rows(suite: Suite) -> Iterator[tuple[Trial, str]]:
    """Yield every row in process, and one on each other target, of those that work."""
    seen: set[str] = set()
    for case in suite.modes():
        for target in suite.rule(case.rule).kernels:
            if suite.why_not(target) or target in seen:
                continue
            try:
                suite.require(matches_reference, suite.trial(case), target)
            except NotApplicable:
                continue
            seen.update({target} - {TORCH_TARGET.name})
            yield suite.trial(case), target


def _expect_nothing(subject: str, found: list[str]) -> None:
    if found:
        raise ContractError(
            subject,
            expected="no change of what is global in the process, and nothing printed",
            found="; ".join(found),
            remedy="set such things with a context manager, while you need them, and print nothing",
        )
