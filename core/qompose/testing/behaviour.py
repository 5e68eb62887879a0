# SPDX-License-Identifier: Apache-2.0
"""The checks of what a lowered model does besides giving the right numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from qompose.graph import operator_name, value_of
from qompose.testing.agreeing import matches_reference
from qompose.testing.building import Inputs, copies
from qompose.testing.failures import Blocked, ContractError
from qompose.testing.measures import first_difference, steps_of, tensors_of
from qompose.testing.suite import Suite
from qompose.testing.trials import Trial, outputs


def behaves(suite: Suite, trial: Trial, target: str) -> None:
    """Results are the same each time, copies work, and shapes are known without computing."""
    suite.require(matches_reference, trial, target)
    lowered, (_, batch) = trial.lowered(target), trial.all_inputs[0]
    first = [x.clone() for x in outputs(lowered, batch)]
    _expect_same(
        trial, target, "the same outputs each time", outputs(lowered, batch), first,
        "let the kernel start from its arguments alone, and not keep what it computed",
    )  # fmt: skip
    if isinstance(lowered, nn.Module):
        _expect_same(
            trial, target, "the same outputs from a deep copy", outputs(_copy(trial, target), batch), first,
            "keep packed weights in a side table, not in the model (DESIGN, targets)",
        )  # fmt: skip
        _check_fake(trial, target, batch, first)
    if isinstance(lowered, GraphModule):
        _check_calls(trial, target, batch)


def _copy(trial: Trial, target: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 copies argument trees so
            return copy.deepcopy(trial.lowered(target))
    except Exception as error:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected="copy.deepcopy to copy the lowered model",
            found=f"{type(error).__name__}: {error}",
            remedy="keep in the model only tensors; pack weights on first use, in a side table",
        ) from error


def _expect_same(
    trial: Trial,
    target: str,
    what: str,
    actual: Sequence[Tensor],
    wanted: Sequence[Tensor],
    remedy: str,
) -> None:
    same = len(actual) == len(wanted) and all(map(torch.equal, actual, wanted))
    if not same:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected=what,
            found=first_difference(wanted, actual, [None] * len(wanted), 1e-12) or "others",
            remedy=remedy,
        )


def _check_fake(trial: Trial, target: str, batch: Inputs, wanted: Sequence[Tensor]) -> None:
    """Check that shapes and types are known without computing, as torch.export and torch.compile need."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    expected = "shapes and dtypes of the outputs from fake tensors"
    remedy = "register a fake (torch.library.register_fake) that gives the shape and dtype of each operator"
    try:
        with mode, torch.no_grad():
            fake = tensors_of(trial.lowered(target)(*(mode.from_tensor(x) for x in batch)))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ContractError(
            f"{trial}, target {target!r}", expected=expected, found=found, remedy=remedy
        ) from error
    kinds = [[(tuple(x.shape), x.dtype) for x in values] for values in (wanted, fake)]
    if kinds[0] != kinds[1]:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected=f"{expected}: {kinds[0]}",
            found=str(kinds[1]),
            remedy=remedy,
        )


class _Kinds(Interpreter):
    """Runs a program, and keeps the shape, the type and the strides of what each of its calls gives."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: dict[Node, str] = {}

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor):
            self.found[n] = _kind(result, strides=_is_custom(n))
        return result


def _is_custom(node: Node) -> bool:
    return getattr(node.target, "namespace", "aten") not in ("aten", "prims")


def _kind(x: Tensor, *, strides: bool) -> str:
    # The stride of a dimension of size 1 is of no consequence.
    steps = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]
    laid = f", strides {steps}" if strides and x.numel() else ""
    return f"{x.dtype}, shape {list(x.shape)}{laid}"


def _check_calls(trial: Trial, target: str, batch: Inputs) -> None:
    """Check that each call gives what its fake kernel gives, and what the program says of it."""
    lowered, mode = trial.lowered(target), FakeTensorMode(allow_non_fake_inputs=True)
    real, fake = _Kinds(lowered), _Kinds(lowered)
    with torch.no_grad():
        real.run(*copies(batch))
        with mode:
            fake.run(*(mode.from_tensor(x) for x in batch))
    for node, found in real.found.items():
        value = value_of(node)
        said = str(value.dtype) if isinstance(value, Tensor) else None
        told = [
            f"{fake.found[node]} from its fake kernel" if fake.found[node] != found else "",
            f"{said} in meta['val']" if said is not None and not found.startswith(said) else "",
        ]
        if any(told):
            raise ContractError(
                f"{trial}, target {target!r}",
                expected=f"fake tensors to tell what {node.name} ({operator_name(node.target)}) gives: "
                f"{found}",
                found=" and ".join(filter(None, told)),
                remedy="let the fake kernel and the dtype given to Region.call say what the kernel gives",
            )


def leaves_inputs_alone(suite: Suite, trial: Trial, target: str) -> None:
    """Who reads the row's inputs after the kernel finds them unchanged."""
    suite.require(matches_reference, suite.plain(trial), target)
    lowered, (_, batch) = trial.lowered(target), trial.all_inputs[0]
    remedy = "write to nothing that the kernel is given; copy first"
    given = copies(batch)
    with torch.no_grad():
        _, *after = tensors_of(lowered(*given))
    _, *wanted = outputs(trial.converted, batch)
    _expect_same(trial, target, "inputs of the model as they were", given, batch, remedy)
    _expect_same(trial, target, "integers that the kernel read as they were", after, wanted, remedy)


def takes_any_batch(suite: Suite, trial: Trial, target: str) -> None:
    """A program for batches of any size stays one."""
    suite.require(matches_reference, suite.plain(trial), target)
    try:
        trial.built  # noqa: B018 - no such program: the check does not apply
        trial.converted  # noqa: B018
    except Exception as error:
        raise Blocked("test_annotates or test_converts", str(trial)) from error
    subject = f"{trial}, target {target!r}"
    try:
        lowered = trial.lowered(target)
    except Exception as error:
        raise ContractError(
            subject,
            expected="a model for batches of any size",
            found=f"{type(error).__name__}: {error}",
            remedy="take sizes from the tensors, not from the example's shapes",
        ) from error
    steps, (_, example) = steps_of(trial.converted), trial.all_inputs[0]
    for size in (2, 7, 13):
        batch = resized(example, size)
        wanted = outputs(trial.converted, batch)
        try:
            actual = outputs(lowered, batch)
            found = first_difference(wanted, actual, steps, suite.tolerance(trial))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            raise ContractError(
                subject,
                expected=f"what the simulated (Q/DQ) model gives for a batch of {size}",
                found=found,
                remedy="take sizes from the tensors, not from the example's shapes",
            )


def resized(batch: Inputs, size: int) -> Inputs:
    """Return inputs with another first dimension."""
    return tuple(x[torch.arange(size) % len(x)] if x.dim() else x for x in batch)
