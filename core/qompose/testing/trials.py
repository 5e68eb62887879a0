# SPDX-License-Identifier: Apache-2.0
"""A trial: one example of one rule under one configuration, taken through all stages once.

Every stage is run when a check first asks for it, and kept; an error is kept as well and raised again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from qompose import QomposeWarning, RequirementWarning, convert_pt2e, lower, report
from qompose.claims import Claim
from qompose.ledger import REFERENCE
from qompose.plan import META_KEY, Operator, Record
from qompose.testing.building import Built, Inputs, Terms, build, copies, inputs_for
from qompose.testing.data import extremes
from qompose.testing.measures import tensors_of
from qompose.testing.models import ROW, Model

RANDOM = "random inputs"
"""What the first batches of `Trial.all_inputs` are."""

Value = TypeVar("Value")


class _Once(Generic[Value]):
    """A property that is computed once; an error is kept, and raised each time."""

    def __init__(self, method: Callable[[Trial], Value]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, trial: Trial, owner: type[Trial]) -> Value:
        value: Value = trial.keep(self.method.__name__, partial(self.method, trial))
        return value


@dataclass
class Trial:
    """The stages of one example, see `Terms`. `warned` has what a stage said."""

    terms: Terms
    warned: dict[str, list[str]] = field(default_factory=dict)
    _kept: dict[str, tuple[bool, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.terms)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned, or raise what it raised, the first time."""
        if name not in self._kept:
            try:
                self._kept[name] = (True, make())
            except Exception as error:
                self._kept[name] = (False, error)
        good, result = self._kept[name]
        if not good:
            raise result
        return result

    def _listening(self, stage: str, make: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = make()
        # Not those about the age of a library or about this machine, which the backend's author cannot help.
        kinds = (QomposeWarning, RuntimeWarning)
        self.warned[stage] = [
            f"{w.category.__name__}: {w.message}"
            for w in caught
            if w.category is UserWarning
            or (issubclass(w.category, kinds) and not issubclass(w.category, RequirementWarning))
        ]
        return result

    @_Once
    def built(self) -> Built:
        """The model and its programs."""
        return build(self.terms)

    @property
    def model(self) -> Model:
        """The float model."""
        return self.built.model

    @property
    def prepared(self) -> GraphModule:
        """The program with observers."""
        return self.built.prepared

    @property
    def record(self) -> Record:
        """What the prepared model carries."""
        record: Record = self.prepared.meta[META_KEY]
        return record

    @property
    def claims(self) -> list[Claim]:
        """The claims of the row's rule."""
        return self.terms.claims_in(self.prepared)

    @property
    def operators(self) -> list[Operator]:
        """What the plan says of the operators of the row."""
        found = self.record.plan.operators
        return [o for o in found if o.module == ROW or o.module.startswith(f"{ROW}.")]

    def batches(self, purpose: str, count: int = 3) -> list[Inputs]:
        """Return batches of random inputs; the same ones for the same purpose."""
        shapes = self.built.shapes
        return [inputs_for(self.terms, shapes, f"{purpose} {i}") for i in range(count)]

    @_Once
    def all_inputs(self) -> list[tuple[str, Inputs]]:
        """Random inputs other than those of calibration, and extreme ones, with what they are."""
        batches = self.batches("evaluation")
        return [
            *((RANDOM, batch) for batch in batches),
            *(("inputs at the ends of their range", batch) for batch in extremes(batches[0])),
        ]

    @_Once
    def calibrated(self) -> GraphModule:
        """The prepared program, once it has seen data."""
        with torch.no_grad():
            for batch in self.batches("calibration"):
                self.prepared(*copies(batch))
            if self.terms.feeds and not self.terms.rule.shares:
                self._show_negatives()
        return self.prepared

    def _show_negatives(self) -> None:
        """Let the observers of the row's outputs see what is below zero, half as far as above.

        A kernel that leaves out a relu is not seen where the least integer stands for zero.
        """
        names = {claim.output for claim in self.claims}
        seen = [outputs(self.model, batch)[0] for batch in self.batches("calibration")]
        for node in self.prepared.graph.nodes:
            if node.op == "call_module" and node.args[0].name in names:
                for values in seen:
                    self.prepared.get_submodule(node.target)(values / -2)

    @_Once
    def converted(self) -> GraphModule:
        """The Q/DQ program."""
        model: GraphModule = self._listening("convert", lambda: convert_pt2e(self.calibrated))
        return model

    @_Once
    def reference(self) -> tuple[GraphModule, str]:
        """The program whose row computes with integers, or else the Q/DQ program, and what that is."""
        try:
            spelled_out = convert_pt2e(self.calibrated, use_reference_representation=True)
        except (
            Exception
        ):  # of operators that core has no reference for; it is not the backend's fault
            return self.converted, "the simulated (Q/DQ) model"
        rows = [row for row in report(spelled_out).rows if row.rule == self.terms.rule.name]
        if rows and all(row.state == REFERENCE for row in rows):
            return spelled_out, "the integer reference"
        return self.converted, "the simulated (Q/DQ) model"

    def lowered(self, target: str) -> Any:
        """Return what runs on a target."""
        return self.keep(
            f"lowered {target}",
            lambda: self._listening(f"lower {target}", lambda: lower(self.converted, target)),
        )


def outputs(model: Callable[..., Any], batch: Inputs) -> list[Tensor]:
    """Run a model of some stage on copies of the inputs, and return the tensors that it gives."""
    with torch.no_grad():
        return tensors_of(model(*copies(batch)))
