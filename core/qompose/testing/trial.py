# SPDX-License-Identifier: Apache-2.0
"""A trial: one example of one rule under one configuration, taken through all stages once.

A captured pattern is an example itself. So is an operator whose required arguments are all tensors; for
another the author gives one (`qompose.backend.OperatorPattern`). Every stage runs when a check first asks for
it, and its result or its error is kept.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

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
    calibrate,
    convert_pt2e,
    lower,
    prepare_pt2e,
    report,
)
from qompose.backend import OperatorPattern, Pattern, Rule
from qompose.backend.pattern import Shape
from qompose.backend.rule import STATIC
from qompose.errors import RequirementWarning
from qompose.plan.plan import Operator, Record
from qompose.program.graph import operator_name
from qompose.program.meta import META_KEY
from qompose.reporting.report_data import REFERENCE
from qompose.spec import qdq
from qompose.spec.claim import Claim
from qompose.testing.fixtures import (
    BEHIND,
    FRONT,
    ROW,
    Model,
    NotApplicable,
    Row,
    extremes,
    parameter,
    random,
    sizes,
    surroundings,
    tensors_of,
)

ROWS_AND_COLUMNS = (8, 8)
"""The shape of tensors in examples that are derived from an operator's schema."""


@dataclass(frozen=True)
class Example:
    """One form of a rule's operation.

    Args:
        label: distinguishes it from the rule's other examples.
        function: takes a tensor for each of `names` and returns the output.
        shapes: of those tensors.
        operators: operators that the function must call.
        alone: whether the function calls nothing else that a rule should take.
        captured: whether the rule's pattern is the function itself.
        problem: why there is no example, for the author of the rule.
    """

    label: str
    function: Callable[..., Tensor]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    operators: tuple[OpOverload, ...]
    alone: bool = True
    captured: bool = False
    problem: str = ""


def examples_of(rule: Rule) -> list[Example]:
    """Return an example for each variant of each pattern, and for each overload of an operator."""
    found: list[Example] = []
    for number, pattern in enumerate(rule.patterns):
        if isinstance(pattern, OperatorPattern):
            found += _of_operators(pattern)
        else:
            found.append(_of_pattern(str(number), pattern))
    return found


def covering_forms(examples: Sequence[Example]) -> set[int]:
    """Return the first form, and others until each operator in its place, and each arity, has occurred.

    A fusion of several operators, each in several forms, has the product of their numbers; a fault in one
    form of one operator shows in any fusion that has it.
    """
    parts = [{*enumerate(e.operators), (len(e.names), "tensors")} for e in examples]
    chosen, missing = set[int](), set[Any]().union(*parts)
    while missing:
        number = 0 if not chosen else max(range(len(parts)), key=lambda n: len(parts[n] & missing))
        chosen.add(number)
        missing -= parts[number]
    return chosen


def _of_pattern(label: str, pattern: Pattern) -> Example:
    operators = tuple(operator for _, operator in pattern.operators)
    return Example(
        label, pattern.function, pattern.parameters, pattern.shapes, operators, captured=True
    )


def _of_operators(pattern: OperatorPattern) -> Iterator[Example]:
    for number, target in enumerate(pattern.targets):
        if number == 0 and pattern.example is not None:
            names = tuple(inspect.signature(pattern.example).parameters)
            yield Example(
                str(target), pattern.example, names, pattern.shapes, (target,), alone=False
            )
        else:
            yield _derived(target, pattern.shapes)


def _derived(target: OpOverload, shapes: Sequence[Shape]) -> Example:
    """Return a call of an operator that requires nothing but tensors."""
    required = [a for a in target._schema.arguments if not a.has_default_value()]
    kinds = [str(argument.type) for argument in required]
    others = [a.name for a, kind in zip(required, kinds, strict=True) if kind not in _COUNTS]
    if others:
        return _missing(
            str(target), (target,),
            f"{operator_name(target)} requires {', '.join(others)} in addition to tensors. "
                "Give the pattern an example, such as OperatorPattern((target,), example=lambda "
                "self: target(self, ...), shapes=((2, 8),)), and use a separate pattern for each "
                "operator with different arguments",
        )  # fmt: skip
    counts = [_COUNTS[kind] for kind in kinds]
    names = tuple(
        name if count == 1 else f"{name}_{i}"
        for name, count in zip((a.name for a in required), counts, strict=True)
        for i in range(count)
    )

    def call(*tensors: Tensor) -> Tensor:
        rest, arguments = list(tensors), []
        for count in counts:
            taken, rest = rest[:count], rest[count:]
            arguments.append(taken[0] if count == 1 else taken)
        result: Tensor = target(*arguments)
        return result

    filled = tuple(shapes) if len(shapes) == len(names) else (ROWS_AND_COLUMNS,) * len(names)
    return Example(str(target), call, names, filled, (target,))


_COUNTS = {"Tensor": 1, "List[Tensor]": 2}
"""Types of arguments in schemas, and how many tensors of an example make one."""


def _missing(label: str, operators: tuple[OpOverload, ...], problem: str) -> Example:
    def refuse(*tensors: Any) -> Tensor:
        raise TypeError(problem)

    return Example(label, refuse, (), (), operators, problem=problem)


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
        feeds: a consumer behind the row reads integers.
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
            "read by an integer consumer": self.feeds,
            "any batch size": self.any_batch,
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
        known = {self.rule.weight, self.rule.bias, self.rule.state}
        known |= {n for n in self.example.names if n.rpartition("_")[0] == self.rule.weight}
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
        NotApplicable: any batch is requested, and the example has one size only.
        Exception: no size of the example runs, exports and can be prepared; this is why.
    """
    example = terms.example
    if len(example.names) != len(example.shapes):
        raise TypeError(
            f"the example takes {', '.join(example.names)}, but has {len(example.shapes)} shape(s)"
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
    with warnings.catch_warnings():  # a check reports that nothing was quantized
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
    row = Row(example.function, example.names, parameters, terms.rule.state)
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
            f"torch.export fails on the example with a dynamic batch size: {first_line}"
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


def calibrate_with(prepared: GraphModule, batches: Sequence[Inputs]) -> GraphModule:
    """Show observers batches, and let algorithms that learn of weights do so."""
    with warnings.catch_warnings():  # the data may look odd
        warnings.simplefilter("ignore", QomposeWarning)
        return calibrate(prepared, [copies(batch) for batch in batches], progress=False)


def copies(inputs: Sequence[Tensor]) -> Inputs:
    """Return copies of tensors."""
    return tuple(x.clone() for x in inputs)


TIE = 1e-3
"""Steps from the middle between two integers at which float arithmetic of any kind rounds alike."""
INEXACT: Final = 2**-22
"""What float32 may make of a step: a scale is rounded, then its inverse, then what that multiplies."""


def _off_ties(batch: Inputs, converted: GraphModule) -> Inputs:
    """Return inputs that quantize alike in any arithmetic: x / scale and x * (1 / scale) differ at a tie.

    A runtime that quantizes a model's inputs itself may take either integer there.
    """
    holders = [node for node in converted.graph.nodes if node.op == "placeholder"]
    if len(holders) != len(batch):
        return batch
    return tuple(_off_ties_of(x, node) for x, node in zip(batch, holders, strict=True))


def _off_ties_of(x: Tensor, node: Node) -> Tensor:
    for user in node.users:
        if user.target is qdq.quantize_per_tensor and not isinstance(user.args[1], Node):
            scale: Any = user.args[1]
            steps = x.double() / scale
            near = (steps - steps.floor() - 0.5).abs() < (steps.abs() * INEXACT).clamp_min(TIE)
            x = torch.where(near, ((steps.floor() + 0.25) * scale).to(x.dtype), x)
    return x


RANDOM = "random inputs"
"""The kind of the first batches of `Trial.all_inputs`."""
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
    """The stages of one example, see `Terms`. `warned` has the warnings of each stage."""

    terms: Terms
    warned: dict[str, list[str]] = field(default_factory=dict)
    _kept: dict[str, tuple[bool, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.terms)

    def on(self, target: str) -> str:
        """Return what failures on a target are about."""
        return f"{self}, target {target!r}"

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
        # Warnings about the age of a library or about this machine are not of the backend's author.
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
        """The record of the prepared model."""
        record: Record = self.prepared.meta[META_KEY]
        return record

    @property
    def claims(self) -> list[Claim]:
        """The claims of the row's rule."""
        return self.terms.claims_in(self.prepared)

    @property
    def operators(self) -> list[Operator]:
        """The operators of the row in the plan."""
        found = self.record.plan.operators
        return [o for o in found if o.module == ROW or o.module.startswith(f"{ROW}.")]

    def batches(self, purpose: str, count: int = 3) -> list[Inputs]:
        """Return batches of random inputs; the same ones for the same purpose."""
        shapes = self.built.shapes
        return [inputs_for(self.terms, shapes, f"{purpose} {i}") for i in range(count)]

    @_Once
    def all_inputs(self) -> list[tuple[str, Inputs]]:
        """Random inputs other than those of calibration, and extreme ones, each with its kind."""
        batches = [_off_ties(batch, self.converted) for batch in self.batches("evaluation")]
        return [
            *((RANDOM, batch) for batch in batches),
            *(("inputs at the bounds of their range", batch) for batch in extremes(batches[0])),
        ]

    @_Once
    def calibrated(self) -> GraphModule:
        """The prepared program, once it has seen data."""
        calibrate_with(self.prepared, self.batches("calibration"))
        with torch.no_grad():
            if self.terms.feeds and not self.terms.rule.shares:
                self._show_negatives()
        return self.prepared

    def _show_negatives(self) -> None:
        """Show the observers of the row's outputs negative values, half as large as the positive ones.

        If the least integer stood for zero, a kernel that leaves out a relu would not be noticed.
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
        """The program whose row computes with integers, or else the Q/DQ program, with its description."""
        try:
            spelled_out = convert_pt2e(self.calibrated, use_reference_representation=True)
        except Exception:  # core has no reference for some operators
            return self.converted, "the simulated (Q/DQ) model"
        rows = [row for row in report(spelled_out).rows if row.rule == self.terms.rule.name]
        if rows and all(row.state == REFERENCE for row in rows):
            return spelled_out, "the integer reference"
        return self.converted, "the simulated (Q/DQ) model"

    def lowered(self, target: str) -> Any:
        """Return the model lowered for a target."""
        return self.keep(
            f"lowered {target}",
            lambda: self._listening(f"lower {target}", lambda: lower(self.converted, target)),
        )

    def disclaimer(self, target: str) -> str:
        """Return what a program says when it is first called, "" unless this machine is wrong for it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QomposeWarning)
            program = lower(self.converted, target)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program(*copies(self.all_inputs[0][1]))
        said = (str(w.message) for w in caught if issubclass(w.category, RequirementWarning))
        return next(said, "")


def outputs(model: Callable[..., Any], batch: Inputs) -> list[Tensor]:
    """Run a model on copies of the inputs, and return the tensors that it returns.

    A program may say that this machine is not for it: `Trial.disclaimer` asks.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RequirementWarning)
        return tensors_of(model(*copies(batch)))
