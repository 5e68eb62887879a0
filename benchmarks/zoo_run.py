# SPDX-License-Identifier: Apache-2.0
"""One model of a zoo through one flow: what `zoo.py` measures, as data."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import qompose
import torch
from qompose.reporting.report_data import FLOAT_KERNEL, KERNEL, Report
from torch import Tensor
from torch.utils import _pytree as pytree
from zoo_flows import Flow
from zoo_peers import PEERS
from zoo_yardstick import buffers_restored, rounded_outputs

CALIBRATION, HELD_OUT, FIRST_HELD_OUT = 4, 2, 100
MORE = 60
"""Calibration inputs where the first ones have not taken every branch."""
LONGEST_ERROR, MOST_REASONS = 600, 8
EQUAL = 200.0
"""What stands for the decibels of outputs without any noise, which JSON has no number for."""

Inputs = list[tuple[Any, ...]]


@cache
def models(zoo: str) -> dict[str, Any]:
    """By name the models of a zoo: of a module, or of a file, with a sequence `EVERY` or `ZOO`."""
    if zoo.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(zoo).stem, zoo)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = import_module(zoo)
    return {model.name: model for model in getattr(module, "EVERY", None) or module.ZOO}


class Stages:
    """What a run goes through, with the seconds of each; tells of each before it begins."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.now = ""
        self._tell = tell

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.now = name
        self._tell(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            taken = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.seconds[name] = round(taken, 4)


class WrongOutputError(Exception):
    """A result that is no result of the model: of another structure, shape or type, or not finite."""


@dataclass(frozen=True)
class _Task:
    """A model on its way: the flow, the inputs, and what the float model makes of those held out."""

    model: Any
    flow: Flow
    calibration: Inputs
    held_out: Inputs
    reference: list[Any]
    stages: Stages

    def outputs(self, model: Callable[..., Any]) -> list[Any]:
        """What a form of the model returns for each of the inputs, apart from what it writes to later."""
        with self.stages("run"), torch.no_grad():
            return [pytree.tree_map(_kept, model(*inputs)) for inputs in self.held_out]


def run(zoo: str, name: str, flow: Flow, tell: Callable[[str], None]) -> dict[str, Any]:
    """A row: whether the flow works on the model, and if so how well; if not, where it ended and why."""
    stages = Stages(tell)
    try:
        with stages("build"):
            model = models(zoo)[name]
            calibration, held_out = _inputs(model, flow)
            reference = _float(model.build(), held_out)
            task = _Task(model, flow, calibration, held_out, reference, stages)
        go = _peer if flow.peer else _ours if flow.members else _yardstick
        found = go(task)
    except Exception as error:  # whatever it is, it is this row's content
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))[-4000:]
        found = {"works": False, "stage": stages.now, "error": text[:LONGEST_ERROR], "trace": trace}
    return {"works": True, **found, "seconds": stages.seconds}


def _inputs(model: Any, flow: Flow) -> tuple[Inputs, Inputs]:
    """Calibration inputs, and others that calibration does not see; with a dynamic batch, two at a time."""
    calibration = [model.inputs(number) for number in range(CALIBRATION)]
    drawn = range(FIRST_HELD_OUT, FIRST_HELD_OUT + HELD_OUT * (1 + flow.dynamic))
    held_out = [model.inputs(number) for number in drawn]
    if flow.dynamic:
        if model.dynamic_shapes is None:
            raise ValueError("the model has no dynamic shapes")
        pairs = zip(held_out[::2], held_out[1::2], strict=True)
        held_out = [pytree.tree_map(_stacked, *pair) for pair in pairs]
    return calibration, held_out


def _stacked(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one, other]) if one.dim() else one


def _float(module: Any, held_out: Inputs) -> list[Any]:
    with torch.no_grad():
        return [pytree.tree_map(_kept, module(*inputs)) for inputs in held_out]


def _kept(value: Any) -> Any:
    """A copy: what a module writes to on its next call is no result of this one."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _yardstick(task: _Task) -> dict[str, Any]:
    with task.stages("export"):
        program = task.model.export()
    bodies = sum(1 for _ in program.graph_module.modules()) > 1
    facts = {"bodies": bodies, "operators": len(program.graph.nodes)}
    try:
        with task.stages("round"):
            rounded = rounded_outputs(program.module(), task.calibration, task.held_out)
            return {**compared(task.reference, rounded, structure=False), **facts}
    except (WrongOutputError, RuntimeError, IndexError) as error:
        return {"sqnr": None, "no_yardstick": f"{type(error).__name__}: {error}", **facts}


def _ours(task: _Task) -> dict[str, Any]:
    stages, flow = task.stages, task.flow
    with stages("export"):
        program = task.model.export(dynamic=flow.dynamic)
    with stages("prepare"):
        prepared = qompose.prepare_pt2e(program, flow.quantizer())
    with stages("calibrate"):
        qompose.calibrate(prepared, task.calibration, progress=False)
    with stages("convert"):
        converted, unseen = _converted(task.model, prepared)
    with buffers_restored(converted):
        simulated = task.outputs(converted)
    with stages("lower"):
        lowered = qompose.lower(converted, flow.target)
    report = qompose.report(lowered)
    results = task.outputs(lowered)
    return {
        **compared(task.reference, results),
        "simulated_sqnr": compared(task.reference, simulated)["sqnr"],
        **coverage(report),
        "unseen": unseen,
        "bytes": [report.bytes_before, report.bytes_after],
    }


def _converted(model: Any, prepared: Any) -> tuple[Any, bool]:
    """The Q/DQ model, and whether parts of it stay float: branches that not even more inputs have taken."""
    try:
        return qompose.convert_pt2e(prepared), False
    except qompose.errors.UncalibratedError:
        more = (model.inputs(number) for number in range(CALIBRATION, CALIBRATION + MORE))
        qompose.calibrate(prepared, more, progress=False)
    try:
        return qompose.convert_pt2e(prepared), False
    except qompose.errors.UncalibratedError:
        return qompose.convert_pt2e(prepared, allow_uncalibrated=True), True


def _peer(task: _Task) -> dict[str, Any]:
    runs = PEERS[task.flow.peer](task.model.build(), task.calibration, task.stages)
    return compared(task.reference, task.outputs(runs), structure=False)


def coverage(report: Report) -> dict[str, Any]:
    """The part of all multiply-accumulates that kernels on integers run, and why not more."""
    total = sum(row.macs for row in report.rows)
    behind = [row for row in report.rows if row.macs and row.state not in (KERNEL, FLOAT_KERNEL)]
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in behind:
        counts = reasons.setdefault((row.operator, row.explanation), [0, 0])
        counts[0] += 1
        counts[1] += row.macs
    ordered = sorted(reasons.items(), key=lambda item: -item[1][1])
    return {
        "macs": total,
        "coverage": 1 - sum(row.macs for row in behind) / total if total else None,
        "int8": report.coverage(KERNEL) if total else None,
        "kernels": report.count(KERNEL) + report.count(FLOAT_KERNEL),
        "operators": len(report.rows),
        "unnamed": [row.name for row in behind if not row.reason],
        "reasons": [[*key, *counts] for key, counts in ordered[:MOST_REASONS]],
    }


def compared(
    reference: Sequence[Any], results: Sequence[Any], *, structure: bool = True
) -> dict[str, Any]:
    """The error of float outputs in dB, of the worst of them, and the part of other values that agree.

    Raises:
        WrongOutputError: a result has another structure (asked for), shape or type than the float model's, or
            is not finite where that is.
    """
    signal: dict[int, float] = {}
    noise: dict[int, float] = {}
    same: list[float] = []
    for expected, actual in zip(reference, results, strict=True):
        wanted, given = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
        if structure and pytree.tree_structure(expected) != pytree.tree_structure(actual):
            raise WrongOutputError("the result has another structure than the float model's")
        if len(wanted) != len(given):
            raise WrongOutputError(f"{len(given)} results, and the float model has {len(wanted)}")
        for number, (one, other) in enumerate(zip(wanted, given, strict=True)):
            if not isinstance(one, Tensor):
                same.append(float(one == other))
                continue
            _check(number, one, other)
            if not one.is_floating_point():
                same.append(float((one == other).double().mean()) if one.numel() else 1.0)
                continue
            finite = one.isfinite()
            one, other = one[finite].double(), other[finite].double()
            signal[number] = signal.get(number, 0.0) + float(one.square().sum())
            noise[number] = noise.get(number, 0.0) + float((one - other).square().sum())
    ratios = [_decibels(signal[number], noise[number]) for number in signal]
    return {
        "sqnr": min(ratios, default=None),
        "outputs": [round(ratio, 2) for ratio in ratios],
        "same": min(same, default=None),
    }


def _check(number: int, one: Tensor, other: Any) -> None:
    if not isinstance(other, Tensor):
        raise WrongOutputError(f"result {number} is {other!r}, and no tensor")
    if one.shape != other.shape or one.dtype != other.dtype:
        raise WrongOutputError(
            f"result {number} is {other.dtype} {tuple(other.shape)}, the float model's "
            f"{one.dtype} {tuple(one.shape)}"
        )
    if one.is_floating_point() and not torch.equal(one.isfinite(), other.isfinite()):
        raise WrongOutputError(
            f"result {number} is not finite in the same places as the float model's"
        )


def _decibels(signal: float, noise: float) -> float:
    if not noise:
        return EQUAL
    return max(-EQUAL, min(EQUAL, 10 * math.log10(signal / noise))) if signal else -EQUAL
