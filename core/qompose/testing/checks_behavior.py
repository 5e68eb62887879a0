# SPDX-License-Identifier: Apache-2.0
"""The checks of what a backend does besides computing: copies, side effects, training."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from qompose import QomposeWarning, convert_pt2e, prepare_qat_pt2e, training_config
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.observers.config import why_not_trained
from qompose.program.graph import operator_name, value_of
from qompose.testing.checks_kernel import matches_reference
from qompose.testing.checks_rule import converts
from qompose.testing.fixtures import (
    Blocked,
    ContractError,
    NotApplicable,
    expect_equal,
    expecting,
    first_difference,
    kinds_of,
    sqnr,
    steps_of,
    tensors_of,
)
from qompose.testing.suite import Suite
from qompose.testing.trial import Inputs, Trial, copies, outputs, quantizer_for
from qompose.training.train_eval import disable_observer


def behaves(suite: Suite, trial: Trial, target: str) -> None:
    """The lowered model is reproducible, can be copied, and knows shapes without computing."""
    suite.require(matches_reference, trial, target)
    lowered, (_, batch) = trial.lowered(target), trial.all_inputs[0]
    first = [x.clone() for x in outputs(lowered, batch)]
    expect_equal(
        trial.on(target), "the same outputs in every call", outputs(lowered, batch), first,
        "make the kernel depend only on its arguments, and do not cache results",
    )  # fmt: skip
    if isinstance(lowered, nn.Module):
        copied = outputs(_copy(trial, target), batch)
        expect_equal(
            trial.on(target), "the same outputs from a deep copy", copied, first,
            "store packed weights in a side table, not in the model",
        )  # fmt: skip
        _check_fake(trial, target, batch, first)
    if isinstance(lowered, GraphModule):
        _check_calls(trial, target, batch)


def _copy(trial: Trial, target: str) -> Any:
    remedy = "store only tensors in the model; pack weights on first use, in a side table"
    with (
        expecting(trial.on(target), "copy.deepcopy supports the lowered model", remedy),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 copies argument trees so
        return copy.deepcopy(trial.lowered(target))


def _check_fake(trial: Trial, target: str, batch: Inputs, wanted: Sequence[Tensor]) -> None:
    """Check that shapes and types are known without computing, as torch.export and torch.compile need."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    expected = "fake tensors give the shapes and dtypes of the outputs"
    remedy = (
        "register a fake kernel (torch.library.register_fake) with the shape and dtype of each "
        "operator"
    )
    with expecting(trial.on(target), expected, remedy), mode, torch.no_grad():
        fake = tensors_of(trial.lowered(target)(*(mode.from_tensor(x) for x in batch)))
    if kinds_of(fake) != kinds_of(wanted):
        raise ContractError(
            trial.on(target),
            expected=f"{expected}: {kinds_of(wanted)}",
            found=str(kinds_of(fake)),
            remedy=remedy,
        )


class _Kinds(Interpreter):
    """Runs a program, and keeps the shape, dtype and strides of each call's result."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: dict[Node, str] = {}

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor):
            custom = getattr(n.target, "namespace", "aten") not in ("aten", "prims")
            self.found[n] = _kind(result, strides=custom)
        return result


def _kind(x: Tensor, *, strides: bool) -> str:
    # The stride of a dimension of size 1 is of no consequence.
    steps = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]
    laid = f", strides {steps}" if strides and x.numel() else ""
    return f"{x.dtype}, shape {list(x.shape)}{laid}"


def _check_calls(trial: Trial, target: str, batch: Inputs) -> None:
    """Check that each call's result agrees with its fake kernel and with its meta."""
    lowered, mode = trial.lowered(target), FakeTensorMode(allow_non_fake_inputs=True)
    real, fake = _Kinds(lowered), _Kinds(lowered)
    with torch.no_grad():
        real.run(*copies(batch))
        with mode:
            fake.run(*(mode.from_tensor(x) for x in batch))
    for node, found in real.found.items():
        value = value_of(node)
        said = str(value.dtype) if isinstance(value, Tensor) else None
        others = [
            f"{fake.found[node]} from its fake kernel" if fake.found[node] != found else "",
            f"{said} in meta['val']" if said is not None and not found.startswith(said) else "",
        ]
        if any(others):
            raise ContractError(
                trial.on(target),
                expected=(
                    f"fake tensors that match what {node.name} ({operator_name(node.target)}) "
                    f"returns: {found}"
                ),
                found=" and ".join(filter(None, others)),
                remedy=(
                    "make the fake kernel and the dtype passed to Region.call match the result "
                    "of the kernel"
                ),
            )


def leaves_inputs_alone(suite: Suite, trial: Trial, target: str) -> None:
    """The kernel writes to none of its inputs, floats or integers."""
    suite.require(matches_reference, suite.plain(trial), target)
    lowered, (_, batch) = trial.lowered(target), trial.all_inputs[0]
    remedy = "do not write to the arguments of the kernel; copy them first"
    given = copies(batch)
    with torch.no_grad():
        _, *after = tensors_of(lowered(*given))
    _, *wanted = outputs(trial.converted, batch)
    subject = trial.on(target)
    expect_equal(subject, "inputs of the model are unchanged", given, batch, remedy)
    expect_equal(subject, "integers that the kernel read are unchanged", after, wanted, remedy)


def takes_any_batch(suite: Suite, trial: Trial, target: str) -> None:
    """A program for batches of any size stays one."""
    if trial.terms.rule.state:
        raise NotApplicable("a buffer has one size")
    suite.require(matches_reference, suite.plain(trial), target)
    remedy = "read sizes from the tensors, not from the shapes of the example"
    with expecting(trial.on(target), "a model that accepts any batch size", remedy):
        lowered = trial.lowered(target)
    steps, (_, example) = steps_of(trial.converted), trial.all_inputs[0]
    for size in (2, 7, 13):
        batch = resized(example, size)
        wanted = outputs(trial.converted, batch)
        expected = f"the outputs of the simulated (Q/DQ) model for a batch of {size}"
        with expecting(trial.on(target), expected, remedy):
            actual = outputs(lowered, batch)
        found = first_difference(wanted, actual, steps, suite.tolerance(trial))
        if found is not None:
            raise ContractError(trial.on(target), expected=expected, found=found, remedy=remedy)


def resized(batch: Inputs, size: int) -> Inputs:
    """Return inputs with another first dimension."""
    return tuple(x[torch.arange(size) % len(x)] if x.dim() else x for x in batch)


def state() -> dict[str, str]:
    """Return the global settings of a process that a backend must not change, as text."""
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "grad mode": str(torch.is_grad_enabled()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
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
    """Return as sentences what an action changes in the process's state, and what it prints."""
    before, printed = state(), io.StringIO()
    with redirect_stdout(printed):
        action()
    after = state()
    found = [
        f"{name} changed from {before[name]:.200} to {after[name]:.200}"
        for name in before
        if before[name] != after[name]
    ]
    return [*found, *([f"it printed {printed.getvalue()[:200]!r}"] if printed.getvalue() else [])]


# It ends at once: Python takes up to two seconds to take apart what torch has imported.
_IMPORT = """
import json, os, sys
import torch, qompose
from qompose import *
from qompose.testing.checks_behavior import changes
print(json.dumps(changes(lambda: qompose.backend.load_backend(sys.argv[1]))), flush=True)
os._exit(0)
"""


def imports_cleanly(suite: Suite) -> None:
    """Importing the backend changes nothing else in the process."""
    source = suite.source
    if not isinstance(source, str):
        raise NotApplicable("the backend has no entry point")
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, source], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Blocked("test_loads", f"{source!r} in a separate process ({done.stderr.strip()})")
    _expect_nothing(f"backend {source!r}, on import", json.loads(done.stdout))


@contextmanager
def _defaults() -> Iterator[None]:
    """Restore torch's initial settings, so that a setting made before is noticed when it is made again."""
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
    """Using the backend changes nothing else in the process."""
    rows = list(_sound_rows(suite))
    if not rows:
        raise NotApplicable("no row lowers")

    def use() -> None:
        for trial, target in rows:
            fresh = Trial(trial.terms)
            outputs(fresh.lowered(target), fresh.batches("calibration", 1)[0])

    use()  # loads what is loaded at first use
    with _defaults():
        found = changes(use)
    _expect_nothing(f"backend {suite.backend.name!r}, in use", found)


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
            expected="global settings of the process are unchanged, and nothing is printed",
            found="; ".join(found),
            remedy="change such settings only in a context manager, and print nothing",
        )


LEAST_SQNR = 40.0
"""The least ratio between the trained and the deployed model, in decibels."""
_TRAINABLE = (
    "make sure that the specifications of the rule can be fake-quantized, and that its guard "
    "accepts the configuration of `training_config`"
)


def trains(suite: Suite, trial: Trial) -> None:
    """The row passes gradients on, and is deployed as it was trained."""
    suite.require(converts, trial)
    reason = why_not_trained(trial.terms.config)
    if reason is None and not trial.terms.rule.trains:
        reason = "the rule has a specification of its own, which is not for training"
    if reason is not None:
        raise NotApplicable(reason)
    config = training_config(trial.terms.config)
    terms = replace(trial.terms, config=config)
    with (
        expecting(
            f"{trial}, in training",
            "prepare_qat_pt2e, a training step and convert_pt2e succeed",
            _TRAINABLE,
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", QomposeWarning)
        prepared = prepare_qat_pt2e(trial.built.program, quantizer_for(terms, trial.model))
        if not terms.claims_in(prepared):
            raise _failure(trial, "the rule claims its example", "nothing was claimed")
        _train(trial, prepared)
        simulated = [outputs(prepared, batch) for batch in trial.batches("calibration")]
        converted = convert_pt2e(prepared)
    deployed = [outputs(converted, batch) for batch in trial.batches("calibration")]
    least = min(
        sqnr(one, other)
        for ones, others in zip(simulated, deployed, strict=True)
        for one, other in zip(ones, others, strict=True)
    )
    if least < LEAST_SQNR:
        wanted = f"{LEAST_SQNR:g} dB between the fake-quantized and the converted model"
        raise _failure(trial, f"at least {wanted}", f"{least:.1f} dB")


def _train(trial: Trial, prepared: GraphModule) -> None:
    """Take gradients of each batch, and leave the model in evaluation with fixed ranges."""
    leaves: dict[str, Tensor] = dict(prepared.requires_grad_().named_parameters())
    for batch in trial.batches("calibration"):
        given = [x.requires_grad_(x.is_floating_point()) for x in copies(batch)]
        leaves |= {f"input {place}": x for place, x in enumerate(given)}
        # An operator may write to what it is given, but not to a leaf.
        results = [x for x in tensors_of(prepared(*(x.clone() for x in given))) if x.requires_grad]
        if results:
            sum(x.float().square().mean() for x in results).backward()  # type: ignore[union-attr]
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    lost = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
    if lost:
        raise _failure(
            trial, "finite gradients", f"the gradients of {', '.join(lost)} are not finite"
        )
    prepared.eval().apply(disable_observer)


def _failure(trial: Trial, expected: str, found: str) -> ContractError:
    subject = f"{trial}, in training"
    return ContractError(subject, expected=expected, found=found, remedy=_TRAINABLE)
