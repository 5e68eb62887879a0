# SPDX-License-Identifier: Apache-2.0
"""Whole networks in int8, on the runtime and in process, held against their Q/DQ models.

Rounding feeds on itself: where one value in 10^5 rounds the other way, each of its readers has it in
hundreds of sums, some of which then round the other way too. With random weights twenty layers make that
two values of three, however alike the operators compute. So a network is held to its Q/DQ model operator
by operator, each on the integers that the Q/DQ model has there; its output to the distance that rounding
has put between the Q/DQ model and the float one; and with trained weights to the bound of the operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import qompose
import torch
from qompose.program.meta import KERNELS_TAG, META_KEY, tag_of
from qompose.spec.qdq import quantize_per_tensor
from qompose.testing.fixtures import sqnr
from qompose_xnnpack import ExecutorchProgram
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from tests.products import xnnpack
from tests.xnnpack.executorch_target.runtime import converted
from tests.zoo import by_name, images, network, tokens

pytest.importorskip("executorch")

COVERAGE = 0.95
OPERATOR = 35.0
"""Least ratio, in dB, of an operator's integers to what the Q/DQ model rounds differently."""
SLACK, SLACK_OF_FEW = 4.0, 10.0
"""By so many dB may the outputs of a few rows be further apart than the Q/DQ and the float model; the ratio
of the four numbers of a head of two classes is mostly chance."""

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network, and the inputs that it is run with; ``layers`` where they can be chosen.

    ``small``: the zoo's narrow one of a few blocks.
    ``bitwise``: whether nothing between the kernels computes floats, which the runtime adds up in an
    order of its own.
    """

    name: str
    size: int
    layers: int | None = None
    bitwise: bool = True
    small: bool = False

    def batch(self, seed: int) -> Batch:
        draw = tokens if self.name.startswith("bert") else images
        return (draw(2, self.size, seed),)


SUBJECTS = (
    Subject(name="mobilenet_v2", size=16, small=True),
    Subject(name="resnet18", size=96),
    Subject(name="resnet50", size=96),
    Subject(name="mobilenet_v2", size=96),
    Subject(name="mobilenet_v3_large", size=96, bitwise=False),
    Subject(name="vit_b_16", size=224, layers=1, bitwise=False),
    Subject(name="bert_base", size=128, layers=2, bitwise=False),
)


@dataclass(frozen=True)
class Outcome:
    """A network in every form, and what each of them gives for inputs that calibration has not seen."""

    subject: Subject
    test: Batch
    converted: GraphModule
    lowered: GraphModule
    program: ExecutorchProgram
    floats: Tensor
    simulated: Tensor
    in_process: Tensor
    on_runtime: Tensor


FULL = ("mobilenet_v2", "resnet18", "bert_base")
"""Networks that have most of what the others have; those are for the long run."""


def _subject(subject: Subject) -> Any:
    if subject.small:
        return pytest.param(subject, id=f"small {subject.name}")
    tier = pytest.mark.full if subject.name in FULL else pytest.mark.long
    return pytest.param(subject, marks=tier, id=subject.name)


@pytest.fixture(scope="module", params=[_subject(subject) for subject in SUBJECTS])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    subject: Subject = request.param
    if subject.small:
        model = by_name(subject.name)
    else:
        model = network(subject.name, size=subject.size, layers=subject.layers)
    if "transformers" in model.tags:
        pytest.importorskip("transformers")
    module, test = model.build(), subject.batch(1000)
    calibration = [subject.batch(seed) for seed in range(1, 9)]
    simulation = converted(module, *calibration, quantizer=xnnpack())
    lowered = qompose.lower(simulation)
    program = qompose.lower(simulation, target="executorch")
    with torch.no_grad():
        outputs = [run(*test) for run in (module, simulation, lowered, program)]
    return Outcome(subject, test, simulation, lowered, program, *outputs)


class Recorded(Interpreter):
    """Runs a Q/DQ model and keeps the value of every node."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n.name] = result = super().run_node(n)
        return result


class Led(Interpreter):
    """Runs a lowered model, each kernel on the integers that the Q/DQ model has at its inputs.

    ``apart``: by operator, how far the kernel's integers are from the Q/DQ model's: ratio in dB, and steps.
    """

    def __init__(self, lowered: GraphModule, simulation: GraphModule, test: Batch) -> None:
        super().__init__(lowered)
        self.apart: dict[str, tuple[float, int]] = {}
        self._claims = simulation.meta[META_KEY].plan.claims
        self._nodes = {node.name: node for node in simulation.graph.nodes}
        recorded = Recorded(simulation)
        recorded.run(*test)
        self._values = recorded.values

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        claims = tag_of(n, KERNELS_TAG)
        if not claims or not isinstance(result, Tensor) or result.dtype is not torch.int8:
            return result
        output = self._claims[claims[-1]].output
        quantize = next(u for u in self._nodes[output].users if u.target is quantize_per_tensor)
        wanted: Tensor = self._values[quantize.name]
        steps = int((wanted.int() - result.int()).abs().max())
        zero_point: Any = quantize.args[2]
        ratio = sqnr(wanted.float() - zero_point, result.float() - zero_point)
        self.apart[output] = (ratio, steps)
        return wanted


def check_operators(lowered: GraphModule, simulation: GraphModule, test: Batch) -> None:
    """Every int8 kernel gives what the Q/DQ model has, to a step and to ``OPERATOR``; the rest is equal."""
    led = Led(lowered, simulation, test)
    with torch.no_grad():
        output = led.run(*test)
        wanted = simulation(*test)
    kernels = [node for node in lowered.graph.nodes if tag_of(node, KERNELS_TAG)]
    assert len(led.apart) == sum(node.meta["val"].dtype is torch.int8 for node in kernels) > 0
    wrong = {n: at for n, at in led.apart.items() if at[0] < OPERATOR or at[1] > 1}
    assert wrong == {}
    assert sqnr(wanted, output) > 100, "what is left in float computes the same"


class TestNetworks:
    def test_nearly_all_work_is_done_on_int8(self, outcome: Outcome) -> None:
        for model in (outcome.lowered, outcome.program):
            assert qompose.report(model).coverage() >= COVERAGE

    def test_the_quantized_part_is_whole_in_delegates(self, outcome: Outcome) -> None:
        delegation = outcome.program.delegation
        assert delegation.strays == ()
        assert [op.place for op in delegation.portable if op.claim is not None] == []
        assert delegation.whole

    def test_every_operator_computes_what_the_simulation_does(self, outcome: Outcome) -> None:
        check_operators(outcome.lowered, outcome.converted, outcome.test)

    def test_the_runtime_computes_what_the_kernels_do(self, outcome: Outcome) -> None:
        if outcome.subject.bitwise:
            assert torch.equal(outcome.on_runtime, outcome.in_process)
        else:
            check_as_near(outcome, outcome.in_process, outcome.on_runtime)

    def test_outputs_are_as_near_as_rounding_lets_them_be(self, outcome: Outcome) -> None:
        for actual in (outcome.in_process, outcome.on_runtime):
            check_as_near(outcome, outcome.simulated, actual)
            check_as_near(outcome, outcome.floats, actual)


def check_as_near(outcome: Outcome, wanted: Tensor, actual: Tensor) -> None:
    assert actual.isfinite().all()
    slack = SLACK if actual.numel() > 16 else SLACK_OF_FEW
    assert sqnr(wanted, actual) > sqnr(outcome.floats, outcome.simulated) - slack
