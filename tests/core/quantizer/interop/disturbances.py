# SPDX-License-Identifier: Apache-2.0
"""What code may do to the process: each change, how it is said, and how to see it."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


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


def autocast() -> tuple[object, ...]:
    """What autocast does now, and how deep it is entered."""
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return product.dtype, torch.get_autocast_dtype("cpu"), depth


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
    "autocast": Case(
        lambda: torch.autocast("cpu", dtype=torch.bfloat16).__enter__(),
        "set torch's autocast on cpu to True",
        autocast,
    ),
    "autocast to another dtype": Case(
        lambda: torch.autocast("cpu", dtype=torch.float16).__enter__(),
        "set the dtype of torch's autocast on cpu to torch.float16",
        autocast,
    ),
    "autocast on another device": Case(
        lambda: torch.set_autocast_enabled("cuda", True),
        "set torch's autocast on cuda to True",
        lambda: torch.is_autocast_enabled("cuda"),
    ),
    "the cache of autocast": Case(
        lambda: torch.set_autocast_cache_enabled(False),
        "set torch's cache of autocast to False",
        torch.is_autocast_cache_enabled,
    ),
    "the depth of autocast": Case(
        torch.autocast_increment_nesting, "set torch's depth of autocast to 1", autocast
    ),
    "anomalies": Case(
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
        "set torch's detection of anomalies (and of NaN) to (True, False)",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    ),
    "denormals": Case(
        lambda: torch.set_flush_denormal(True),
        "set torch's flushing of denormals to True",
        lambda: bool((torch.tensor([sys.float_info.min], dtype=torch.float64) / 2 == 0).item()),
    ),
    "printing": Case(
        lambda: torch.set_printoptions(precision=2, sci_mode=True),
        "set how torch prints to {'precision': 2, 'threshold': 1000, 'edgeitems': 3, 'linewidth': 80, "
        "'sci_mode': True}",
        lambda: str(torch.tensor([1.23456])),
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
