# SPDX-License-Identifier: Apache-2.0
"""qompose's quantizers in torchao's own engine: what they annotate there, and that its results are ours.

Ranges are min-max and channels are not balanced, unless a test says otherwise: then both engines compute
the same numbers, and where something is counted otherwise, the table says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import qompose
import torch
from qompose_embedding import EmbeddingQuantizer
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests import products
from tests.core.observers.test_observing import TOKENS
from tests.core.toy import INT8, WEIGHT, Annotator, Model, annotate, export, randn, seeded, sqnr
from tests.ecosystem.makers import embedding as torchao_embedding
from tests.interop.peers import (
    THEIR_WARNINGS,
    Converted,
    by_qompose,
    by_torchao,
    executorch_xnnpack,
    torchao_engine,
    torchao_observer,
    torchao_quantizer,
    torchao_x86,
)
from tests.processes import python
from tests.sampling import at_once
from tests.zoo import by_name

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)

aten = torch.ops.aten


RANGES: dict[str, Any] = {"range": "minmax", "balance": False, "algorithms": ()}


def xnnpack() -> Any:
    return products.xnnpack(**RANGES)


def x86() -> Any:
    return products.x86(**RANGES)


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "xnnpack": xnnpack,
    "x86": x86,
    "embedding": EmbeddingQuantizer,
    "embedding+xnnpack": lambda: qompose.compose("embedding", xnnpack()),
    "x86+xnnpack": lambda: qompose.compose(x86(), xnnpack()),
    "torchao's x86": lambda: qompose.compose(torchao_x86()),
    "executorch's xnnpack": lambda: qompose.compose(executorch_xnnpack()),
    "torchao's embedding+xnnpack": lambda: qompose.compose(torchao_embedding(), xnnpack()),
}
MODELS = ("bottleneck", "embedding_mlp", "vision_transformer", "scalars", "in_place")
AT_ONCE = {
    ("bottleneck", "xnnpack"), ("vision_transformer", "x86"), ("embedding_mlp", "embedding"),
    ("embedding_mlp", "embedding+xnnpack"), ("in_place", "x86+xnnpack"), ("bottleneck", "torchao's x86"),
    ("scalars", "executorch's xnnpack"), ("embedding_mlp", "torchao's embedding+xnnpack"),
}  # fmt: skip
"""Each quantizer once, and each model; the other pairs are more of the same."""


def both(model: str, quantizer: str) -> tuple[Converted, Converted, list[Tensor]]:
    """Ours, theirs, and what the float program computes."""
    inputs = by_name(model).inputs()
    program = by_name(model).export()
    reference = program.module()(*inputs)
    ours = by_qompose(program, QUANTIZERS[quantizer](), inputs)
    theirs = by_torchao(by_name(model).export(), QUANTIZERS[quantizer](), inputs)
    return ours, theirs, [reference] if isinstance(reference, Tensor) else list(reference)


ROUNDED = 25.0
"""Decibels that every model here has. Tables are 10 dB worse in torchao's engine: see `test_tables`."""


@pytest.fixture
def biases_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torchao's engine: ours makes those integers that a kernel adds as integers."""
    monkeypatch.setattr("qompose.conversion.qparams_solver.rounded_biases", lambda *_: {})


@pytest.mark.usefixtures("biases_left_alone")
@pytest.mark.parametrize(
    ("model", "quantizer"),
    at_once([(model, name) for model in MODELS for name in QUANTIZERS], *AT_ONCE),
)
@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # nothing is quantized
def test_the_same_operators_and_numbers(model: str, quantizer: str) -> None:
    ours, theirs, reference = both(model, quantizer)
    assert (ours.quantizes, ours.dequantizes) == (theirs.quantizes, theirs.dequantizes)
    exact = model != "embedding_mlp" or "embedding" not in quantizer
    assert theirs.dequantizes or (model, quantizer) not in AT_ONCE, "models in float are compared"
    for one, other, floats in zip(ours.outputs, theirs.outputs, reference, strict=True):
        if theirs.dequantizes:
            assert torch.equal(one, other) or not exact
        assert sqnr(floats, other) > ROUNDED


def test_tables() -> None:
    """The parameters are the same; torch's operator rounds before it adds the zero point, a float."""
    found = []
    for converted in both("embedding_mlp", "embedding")[:2]:
        buffer = converted.model.get_buffer
        found.append(
            [
                ([buffer(str(argument.target)) for argument in node.args[:3]], node.args[3:])
                for node in converted.calls("dequantize_per_channel")
            ]
        )
    assert found[0]
    for ((integers, *one), rest), ((their_integers, *other), their_rest) in zip(
        *found, strict=True
    ):
        assert all(map(torch.equal, one, other))
        assert rest == their_rest == (0, 0, 255, torch.uint8)
        distance = (integers.int() - their_integers.int()).abs()
        assert 0 < int(distance.max()) <= 1


@pytest.mark.full
@pytest.mark.parametrize("model", ("bottleneck", "embedding_mlp", "vision_transformer"))
def test_the_result_is_exported_and_runs_on_executorch(model: str) -> None:
    inputs = by_name(model).inputs()
    converted = by_torchao(by_name(model).export(), QUANTIZERS["embedding+xnnpack"](), inputs)
    exported = torch.export.export(converted.model, inputs)
    assert torch.equal(exported.module()(*inputs), converted.outputs[0])
    delegates, result = on_executorch(exported, inputs)
    assert delegates > 0
    assert sqnr(converted.outputs[0], result) > 30


def on_executorch(exported: Any, inputs: tuple[Tensor, ...]) -> tuple[int, Tensor]:
    """How many delegates ExecuTorch's own partitioner makes of a program, and what its runtime computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        import executorch.kernels.quantized  # noqa: F401
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.extension.pybindings import portable_lib

        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        calls = [str(node.target) for node in edge.exported_program().graph.nodes]
        config = ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)
        program = edge.to_executorch(config)
        loaded = portable_lib._load_for_executorch_from_buffer(program.buffer)
        return calls.count("executorch_call_delegate"), loaded.forward(inputs)[0]


class TestConfigurations:
    """Default ranges, and what another engine does not do."""

    def test_balancing_is_said_not_to_be_done(self) -> None:
        model = by_name("mlp")
        with pytest.warns(qompose.QomposeWarning, match="xnnpack"):
            torchao_engine.prepare_pt2e(model.export().module(), products.xnnpack())

    BLOCKS = qompose.QuantizationSpec(
        torch.int8, qompose.observers.PerBlockMinMaxObserver, -127, 127,
        torch.per_channel_symmetric, block_size=(3,),
    )  # fmt: skip
    BFLOAT16 = qompose.QuantizationSpec(torch.bfloat16, qompose.observers.PlaceholderObserver)

    @pytest.mark.parametrize(("spec", "named"), [(BLOCKS, "block_size"), (BFLOAT16, "bfloat16")])
    def test_what_a_user_annotates_and_the_engine_cannot_stays_in_float(
        self, spec: Any, named: str
    ) -> None:
        class Weights(Annotator):
            def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
                for observer in observers.values():
                    observer.subject = "weight -> linear"

        def linears(node: Node) -> None:
            if node.target is aten.linear.default:
                annotate(node, {node.args[1]: spec})

        prepared = torchao_engine.prepare_pt2e(
            export(seeded(nn.Linear(6, 3)), randn(4, 6)).module(), Weights(linears)
        )
        expected = prepared(randn(4, 6))
        with pytest.warns(qompose.QomposeWarning, match=f"weight -> linear .*{named}"):
            converted = torchao_engine.convert_pt2e(prepared)
        assert torch.equal(converted(randn(4, 6)), expected)

    def test_tokens_at_run_time_are_refused(self) -> None:
        """Torchao looks for operators that choose their parameters, and finds none."""

        def linears(node: Node) -> None:
            if node.target is aten.linear.default:
                annotate(node, {node.args[0]: TOKENS})

        program = export(seeded(nn.Linear(6, 3)), randn(4, 6)).module()
        prepared = torchao_engine.prepare_pt2e(program, Annotator(linears))
        with pytest.raises(qompose.errors.ConfigError, match="block_size"):
            torchao_engine.convert_pt2e(prepared)

    def test_a_mask_stays_in_float(self) -> None:
        """Quantized it would become a finite number, and attention would reach what it hides."""

        def add(node: Node) -> None:
            if node.target is aten.add.Tensor:
                annotate(node, dict.fromkeys(node.args, INT8), INT8)

        inputs = randn(4, 4), torch.full((4, 4), -torch.inf).triu(1)
        masked = Model(lambda m, x, mask: torch.softmax(x + mask, -1))
        prepared = torchao_engine.prepare_pt2e(export(masked, *inputs).module(), Annotator(add))
        prepared(*inputs)
        with pytest.warns(qompose.QomposeWarning, match="infinite"):
            converted = torchao_engine.convert_pt2e(prepared)
        result = converted(*inputs)
        assert bool((result.triu(1) == 0).all())
        assert 30 < sqnr(masked(*inputs), result) < 80  # the scores are quantized, the mask is not

    def test_observers_that_saw_nothing_are_named(self) -> None:
        prepared = torchao_engine.prepare_pt2e(by_name("mlp").export().module(), xnnpack())
        with pytest.raises(qompose.errors.UncalibratedError) as caught:
            torchao_engine.convert_pt2e(prepared)
        assert any("weight -> linear in 0" in tensor for tensor in caught.value.tensors)


class TestWrittenByUsers:
    """Quantizers that write qompose's specifications in `annotate`."""

    @staticmethod
    def all_kinds(node: Node) -> None:
        """Plain, shared, derived and fixed specifications."""

        def bias_scale(observers: list[Any]) -> tuple[Tensor, Tensor]:
            scale = observers[0].calculate_qparams()[0] * observers[1].calculate_qparams()[0]
            return scale, torch.zeros_like(scale, dtype=torch.int64)

        if node.target is aten.linear.default:
            x, weight, bias = node.args
            derived = qompose.spec.DerivedQuantizationSpec(
                [(x, node), (weight, node)], bias_scale, torch.int32,
                qscheme=torch.per_channel_symmetric, ch_axis=0,
            )  # fmt: skip
            annotate(node, {x: INT8, weight: WEIGHT, bias: derived}, INT8)
        elif node.target is aten.cat.default:
            first, second = node.args[0]
            shared = qompose.spec.SharedQuantizationSpec((first, node))
            annotate(node, {first: INT8, second: shared}, shared)
        elif node.target is aten.sigmoid.default:
            fixed = qompose.spec.FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0)
            annotate(node, {node.args[0]: INT8}, fixed)

    def test_all_kinds_of_specifications(self) -> None:
        layers = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 3)}
        model = Model(lambda m, x: m.second(torch.cat([m.first(x), x], 0)).sigmoid(), **layers)
        program = export(seeded(model), randn(4, 6))
        ours, theirs = (
            run(program, Annotator(self.all_kinds), (randn(4, 6),))
            for run in (by_qompose, by_torchao)
        )
        assert (theirs.quantizes, theirs.dequantizes) == (ours.quantizes, ours.dequantizes)
        assert torch.equal(ours.outputs[0], theirs.outputs[0])
        assert sqnr(program.module()(randn(4, 6)), theirs.outputs[0]) > 30
        concatenated = next(n for n in theirs.model.graph.nodes if n.target is aten.cat.default)
        assert len({n.args[1] for n in (*concatenated.args[0], *concatenated.users)}) == 1
        fixed = theirs.calls("dequantize_per_tensor")[-1].args[1:5]
        assert fixed == (1 / 256, 0, 0, 255)
        bias = next(n for n in theirs.calls("dequantize_per_channel") if n.args[-1] is torch.int32)
        assert bias.args[4:6] == (-(2**31), 2**31 - 1)

    def test_observers_of_torchao_in_our_specifications(self) -> None:
        """torchao's observers take no `block_size`, and its engine passes every field that there is."""
        spec = qompose.QuantizationSpec(
            torch.int8, torchao_observer.MinMaxObserver, -128, 127, torch.per_tensor_affine
        )

        def linear(node: Node) -> None:
            if node.target is aten.linear.default:
                annotate(node, {node.args[0]: spec})

        program = export(seeded(nn.Linear(6, 3)), randn(4, 6))
        assert by_torchao(program, Annotator(linear), (randn(4, 6),)).quantizes == 1


class TestInComposableQuantizer:
    """Beside torchao's quantizers in torchao's own composition: who comes first, keeps what it annotated."""

    MIXED: ClassVar[dict[str, tuple[Callable[[], list[Any]], tuple[int, int]]]] = {
        "ours, theirs": (lambda: [EmbeddingQuantizer(), executorch_xnnpack()], (6, 10)),
        "theirs, ours": (lambda: [torchao_embedding(), xnnpack()], (3, 7)),
        "theirs last": (lambda: [xnnpack(), torchao_embedding()], (3, 7)),
        "a composition": (lambda: [torchao_x86(), qompose.compose("embedding", xnnpack())], (2, 6)),
    }

    @pytest.mark.parametrize("name", MIXED)
    def test_mixed(self, name: str) -> None:
        make, counts = self.MIXED[name]
        model = by_name("embedding_mlp")
        reference = model.export().module()(*model.inputs())
        composed = torchao_quantizer.ComposableQuantizer(make())
        mixed = by_torchao(model.export(), composed, model.inputs())
        assert (mixed.quantizes, mixed.dequantizes) == counts
        assert sqnr(reference, mixed.outputs[0]) > 30

    @pytest.mark.parametrize(
        ("first", "left"), [(torchao_x86, 0), (torchao_embedding, 3)], ids=["x86", "embedding"]
    )
    def test_what_stands_is_left_alone(self, first: Callable[[], Any], left: int) -> None:
        """All that both want goes to the first; what only ours wants is still ours."""
        program = by_name("embedding_mlp").export().module()
        first().annotate(program)
        before = {
            node.name: (id(note), dict(note.input_qspec_map), note.output_qspec, note._annotated)
            for node in program.graph.nodes
            if (note := node.meta.get("quantization_annotation"))
        }
        xnnpack().annotate(program)
        notes = {n.name: n.meta.get("quantization_annotation") for n in program.graph.nodes}
        for name, (identity, inputs, output, annotated) in before.items():
            note = notes[name]
            assert (id(note), note.input_qspec_map) == (identity, inputs)
            assert (note.output_qspec, note._annotated) == (output, annotated)
        ours = [n for n, note in notes.items() if note is not None and n not in before]
        assert len(ours) == left


class TestKinship:
    """Which classes count as torchao's, and when."""

    SPECS = (
        qompose.QuantizationSpec(torch.int8, qompose.observers.MinMaxObserver),
        qompose.spec.FixedQParamsQuantizationSpec(torch.int8, 1.0, 0),
        qompose.spec.SharedQuantizationSpec(None),  # type: ignore[arg-type]
        qompose.spec.DerivedQuantizationSpec([], lambda _: None, torch.int8),  # type: ignore[arg-type, return-value]
    )

    def test_each_specification_is_one_of_theirs_and_no_other(self) -> None:
        for spec in self.SPECS:
            name = type(spec).__name__
            for other in map(type, self.SPECS):
                theirs = getattr(torchao_quantizer, other.__name__)
                assert isinstance(spec, theirs) == (other.__name__ == name)
            assert isinstance(spec, torchao_quantizer.QuantizationSpecBase)

    def test_theirs_are_none_of_ours(self) -> None:
        theirs = torchao_quantizer.QuantizationSpec(torch.int8, torchao_observer.MinMaxObserver)
        assert not isinstance(theirs, qompose.QuantizationSpec)
        assert not isinstance(torchao_x86(), qompose.Quantizer)
        assert not isinstance(torchao_observer.MinMaxObserver(), qompose.observers.MinMaxObserver)


FLOW = """
import sys, torch
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(True, balance=False))
assert not [name for name in sys.modules if name.startswith(("torchao", "executorch"))]
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
x = torch.randn(2, 3, 8, 8)
prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
prepared(x)
print(convert_pt2e(prepared).code.count("torch.ops.quantized_decomposed.quantize_per_tensor"))
"""


@pytest.mark.full
def test_torchao_is_not_imported_and_may_come_later() -> None:
    assert python("-c", FLOW).strip() == "2"
