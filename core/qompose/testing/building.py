# SPDX-License-Identifier: Apache-2.0
"""From an example of a rule to the largest prepared program in which the rule applies."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from qompose import (
    ComposableQuantizer,
    QomposeWarning,
    QuantizationConfig,
    Quantizer,
    Rule,
    prepare_pt2e,
)
from qompose.claims import Claim
from qompose.patterns import Shape
from qompose.plan import META_KEY
from qompose.rules import STATIC
from qompose.testing.data import parameter, random, sizes
from qompose.testing.examples import Example
from qompose.testing.failures import NotApplicable
from qompose.testing.models import BEHIND, FRONT, Model, Row, surroundings

Inputs = tuple[Tensor, ...]

MOST_BATCHES = 64
"""The bound of a batch that may vary."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a trial is about.

    Args:
        name: of the configuration.
        subject: makes the backend's quantizer, with a configuration for everything.
        label: what reports call that quantizer.
        others: quantizers that claim nothing and bring a target.
        targets: names of all targets, for what stands around the row.
        feeds: a consumer behind the row wants integers.
        witness: the row's inputs are quantized, and read again once it has run.
        any_batch: the program takes batches of any size.
        variation: how the example differs from that of the rule; its sizes are then taken as they are.
        any_size: take the first size that can be prepared, whether the rule applies or not.
    """

    rule: Rule
    example: Example
    name: str
    config: QuantizationConfig
    subject: Callable[[QuantizationConfig], Quantizer]
    label: str
    others: tuple[Quantizer, ...] = ()
    targets: tuple[str, ...] = ("torch",)
    feeds: bool = False
    witness: bool = False
    any_batch: bool = False
    any_size: bool = False
    variation: str = ""
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        facts = {
            "read by a consumer of integers": self.feeds,
            "batches of any size": self.any_batch,
            self.variation: bool(self.variation),
            str(self.dtype): self.dtype is not torch.float32,
        }
        return ", ".join(
            [
                f"backend {self.label!r}",
                f"rule {self.rule.name!r}",
                f"example {self.example.label}",
                f"config {self.name!r}",
                *(fact for fact, holds in facts.items() if holds),
            ]
        )

    @property
    def is_static(self) -> bool:
        """Whether activations are quantized with parameters that calibration finds."""
        return self.config.mode == STATIC

    @property
    def stored(self) -> tuple[bool, ...]:
        """Which of the example's tensors are parameters of the model."""
        known = {self.rule.weight, self.rule.bias}
        if self.example.captured:  # such as a bias that the rule does not declare
            known |= set(self.example.names) - set(self.rule.activations)
        return tuple(
            name in known
            and not (callable(shape) and name not in (self.rule.weight, self.rule.bias))
            for name, shape in zip(self.example.names, self.example.shapes, strict=False)
        )

    def claims_in(self, prepared: GraphModule) -> list[Claim]:
        """Return the claims of the row's rule."""
        plan = prepared.meta[META_KEY].plan
        wanted = (self.label, self.rule.name)
        return [claim for claim in plan.claims if (claim.owner, claim.rule) == wanted]


@dataclass(frozen=True)
class Built:
    """A model that runs, its program, and that with observers."""

    model: Model
    shapes: tuple[Shape, ...]
    program: ExportedProgram
    prepared: GraphModule


def build(terms: Terms) -> Built:
    """Return the largest model in which the rule applies; where it never does, the example's own size.

    Programs that take any batch are tried where the rule applies to no other.

    Raises:
        NotApplicable: any batch is asked for, and the example has one size only.
        Exception: no size of the example runs, exports and can be prepared; this is why.
    """
    example = terms.example
    if len(example.names) != len(example.shapes):
        raise TypeError(
            f"the example takes {', '.join(example.names)}, and has {len(example.shapes)} shapes"
        )
    failures: list[Exception] = []
    built: list[Built] = []
    for any_batch, shapes in _attempts(terms):
        try:
            found = _build(terms, shapes, any_batch=any_batch)
        except Exception as error:
            if not (any_batch and built):
                failures.append(error)
            continue
        if terms.any_size or terms.claims_in(found.prepared):
            return found
        built.append(found)
    if not built:
        raise failures[-1]
    return next((b for b in built if b.shapes == example.shapes), built[-1])


def _attempts(terms: Terms) -> Iterator[tuple[bool, tuple[Shape, ...]]]:
    if terms.variation:
        yield False, terms.example.shapes
        return
    for any_batch in [True] if terms.any_batch else [False, True]:
        for shapes in sizes(terms.example.shapes, terms.stored):
            yield any_batch, shapes


def _build(terms: Terms, shapes: tuple[Shape, ...], *, any_batch: bool) -> Built:
    front = terms.witness or (terms.rule.condition is not None and terms.is_static)
    model, inputs = _model(terms, shapes, front=front), inputs_for(terms, shapes, "example")
    with torch.no_grad():
        model(*copies(inputs))
        program = _export(model, inputs, any_batch=any_batch)
    if not front and _writes_inputs(program):
        model = _model(terms, shapes, front=True)
        program = _export(model, inputs, any_batch=any_batch)
    with warnings.catch_warnings():  # that nothing was quantized is told by a check
        warnings.simplefilter("ignore", QomposeWarning)
        prepared = prepare_pt2e(program, quantizer_for(terms, model))
    return Built(model, shapes, program, prepared)


def _model(terms: Terms, shapes: Sequence[Shape], *, front: bool) -> Model:
    generator, example = _generator(terms, "parameters"), terms.example
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        parameters = {
            name: parameter(shape, terms.dtype, generator)
            for name, shape, stored in zip(example.names, shapes, terms.stored, strict=True)
            if stored
        }
    row = Row(example.function, example.names, parameters)
    behind = terms.feeds or (terms.rule.carries and terms.is_static)
    return Model(row, front=front, behind=behind, witness=terms.witness).eval()


def inputs_for(terms: Terms, shapes: Sequence[Shape], purpose: str) -> Inputs:
    """Return random inputs; the same ones for the same purpose."""
    generator = _generator(terms, purpose)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        given = [s for s, stored in zip(shapes, terms.stored, strict=True) if not stored]
        return tuple(
            random(shape, terms.dtype, generator, place) for place, shape in enumerate(given)
        )


def _generator(terms: Terms, purpose: str) -> torch.Generator:
    seed = zlib.crc32(f"{terms.rule.name} {terms.example.label} {purpose}".encode())
    return torch.Generator().manual_seed(seed)


def _export(model: Model, inputs: Inputs, *, any_batch: bool) -> ExportedProgram:
    if not any_batch:
        return torch.export.export(model, copies(inputs))
    batch = Dim("batch", min=2, max=MOST_BATCHES)
    dims = tuple({0: batch} if x.dim() else None for x in inputs)
    try:
        return torch.export.export(model, copies(inputs), dynamic_shapes={"inputs": dims})
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotApplicable(
            f"torch.export takes the example with one size of batch: {first_line}"
        ) from error


def quantizer_for(terms: Terms, model: Model) -> Quantizer:
    """Return the row's quantizer, with those of what stands around it."""
    fronts = [FRONT] if model.front is not None else []
    behinds = [BEHIND] if model.behind is not None else []
    members = surroundings(terms.config, fronts, behinds, terms.targets)
    return ComposableQuantizer([*members, terms.subject(terms.config), *terms.others])


def _writes_inputs(program: ExportedProgram) -> bool:
    """Tell whether an operator writes into an input in place; such a model needs copies in front."""
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and value.op == "placeholder"
        for node in program.graph.nodes
        if isinstance(node.target, OpOverload)
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False)
        if isinstance(value, Node)
    )


def copies(inputs: Sequence[Tensor]) -> Inputs:
    """Return copies of tensors."""
    return tuple(x.clone() for x in inputs)
