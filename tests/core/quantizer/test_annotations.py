# SPDX-License-Identifier: Apache-2.0
"""Quantizers that annotate, as the tutorials of this field write them, alone and in composition."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec, Quantizer
from qompose.errors import ConfigError
from qompose.program.meta import ANNOTATION_KEY
from qompose.quantizer.annotations import native_spec
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    SharedQuantizationSpec,
)
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.toy import (
    INT8,
    LINEAR,
    LINEAR_RELU,
    WEIGHT,
    WEIGHT_PER_TENSOR,
    Annotator,
    NullQuantizer,
    annotate,
    convert,
    export,
    graph_text,
    groups_of,
    nodes_calling,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

aten = torch.ops.aten
FIXED = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)


def derived_bias(node: Node, per_channel: bool) -> DerivedQuantizationSpec:
    def scale_of_product(observers: list[nn.Module]) -> tuple[Tensor, Tensor]:
        activation, weight = (observer.calculate_qparams() for observer in observers)  # type: ignore[operator]
        scale = activation[0] * weight[0]
        return scale, torch.zeros_like(scale, dtype=torch.int64)

    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    return DerivedQuantizationSpec(
        [(node.args[0], node), (node.args[1], node)], scale_of_product, torch.int32,
        -(2**31), 2**31 - 1, scheme, ch_axis=0 if per_channel else None,
    )  # fmt: skip


def tutorial(node: Node) -> None:
    """The annotations of torch's tutorial on writing a quantizer."""
    if node.target is aten.linear.default:
        x, weight, bias = node.args
        annotate(node, {x: INT8, weight: WEIGHT_PER_TENSOR, bias: derived_bias(node, False)}, INT8)
    elif node.target is aten.add.Tensor:
        first, second = node.args
        shared = SharedQuantizationSpec((first, node))
        annotate(node, {first: INT8, second: shared}, shared)
    elif node.target is aten.sigmoid.default:
        annotate(node, {node.args[0]: INT8}, FIXED)


class Tutorial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x) + torch.tanh(self.b(x)))


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return export(seeded(Tutorial()), randn(6, 4))


@pytest.fixture(scope="module")
def converted(program: torch.export.ExportedProgram) -> GraphModule:
    return convert(program, Annotator(tutorial), randn(6, 4))


def test_the_tutorials_groups(program: torch.export.ExportedProgram) -> None:
    assert groups_of(prepare(program, Annotator(tutorial))) == {
        frozenset({"x -> linear", "x -> linear_1"}),
        frozenset({"a_weight -> linear"}),
        frozenset({"b_weight -> linear_1"}),
        frozenset({"a_bias -> linear"}),
        frozenset({"b_bias -> linear_1"}),
        frozenset(
            {
                "output of linear",
                "linear -> add",
                "tanh -> add",
                "output of add",
                "add -> sigmoid",
            }
        ),
        frozenset({"output of linear_1"}),
        frozenset({"output of sigmoid"}),
    }


def test_the_inputs_and_the_output_of_a_sum_have_one_scale(converted: GraphModule) -> None:
    (add,) = nodes_calling(converted, "add")
    (after,) = add.users
    scales = {node.args[1:] for node in (*add.all_input_nodes, after)}
    assert len(scales) == 1


def test_fixed_parameters_are_used_as_given(converted: GraphModule) -> None:
    (sigmoid,) = nodes_calling(converted, "sigmoid")
    (quantize,) = sigmoid.users
    assert quantize.args[1:] == (1 / 256, 0, 0, 255, torch.uint8)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per tensor", "per channel"])
def test_a_derived_bias_is_int32_with_the_scale_of_the_product(per_channel: bool) -> None:
    def annotate_linear(node: Node) -> None:
        if node.target is aten.linear.default:
            x, weight, bias = node.args
            spec = WEIGHT if per_channel else WEIGHT_PER_TENSOR
            annotate(node, {x: INT8, weight: spec, bias: derived_bias(node, per_channel)})

    model, x = seeded(nn.Linear(4, 3)), randn(6, 4)
    converted = convert(export(model, x), Annotator(annotate_linear), x)
    (linear,) = nodes_calling(converted, "linear")
    read_x, read_weight, read_bias = linear.args
    state = converted.state_dict()
    assert not any(
        tensor.dtype is torch.float32 and name == "bias" for name, tensor in state.items()
    )
    (integers,) = (tensor for tensor in state.values() if tensor.dtype is torch.int32)
    weight_scale = (
        state[read_weight.args[1].target] if per_channel else torch.tensor(read_weight.args[1])
    )
    bias_scale = state[read_bias.args[1].target] if per_channel else torch.tensor(read_bias.args[1])
    assert torch.allclose(bias_scale, weight_scale * read_x.args[1], rtol=1e-6)
    assert torch.equal(integers, torch.round(model.bias / bias_scale).to(torch.int32))
    assert sqnr(model(x), converted(x)) > 35


def test_the_tutorials_model_is_close_to_the_float_one(
    program: torch.export.ExportedProgram, converted: GraphModule
) -> None:
    assert sqnr(program.module()(randn(6, 4)), converted(randn(6, 4))) > 30


def linears(output: Any = INT8) -> Callable[[Node], None]:
    def annotate_node(node: Node) -> None:
        if node.target is aten.linear.default:
            annotate(node, {node.args[0]: INT8, node.args[1]: WEIGHT}, output)

    return annotate_node


def test_fused_operators_are_one_claim() -> None:
    """As quantizers of this field annotate a fusion: the input on its first, the output on its last."""

    def fuse(node: Node) -> None:
        if node.target is aten.relu.default:
            linear = node.args[0]
            annotate(linear, {linear.args[0]: INT8, linear.args[1]: WEIGHT})
            annotate(node, {}, INT8)
            for fused in (linear, node):
                fused.meta[ANNOTATION_KEY]._annotated = True

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    prepared = prepare(export(model, randn(2, 3)), Annotator(fuse))
    assert [claim.nodes for claim in plan_of(prepared).claims] == [
        ("linear", "relu"), ("linear_1", "relu_1"),
    ]  # fmt: skip
    assert graph_text(prepared) == graph_text(
        prepare(export(model, randn(2, 3)), toy(LINEAR_RELU, LINEAR))
    )


def test_integers_are_refused_with_a_reason() -> None:
    def annotate_everything(node: Node) -> None:
        if node.target is aten.embedding.default:
            annotate(node, {node.args[0]: INT8, node.args[1]: INT8}, INT8)

    model = nn.Embedding(5, 3)
    prepared = prepare(export(model, torch.tensor([1, 2])), Annotator(annotate_everything))
    assert groups_of(prepared) == {
        frozenset({"weight -> embedding"}), frozenset({"output of embedding"}),
    }  # fmt: skip
    assert torch.equal(prepared(torch.tensor([1, 2])), model(torch.tensor([1, 2])))


def test_rule_tables_write_what_other_engines_read(program: torch.export.ExportedProgram) -> None:
    """A rule quantizer's own `annotate`, used as an annotator, makes the same plan."""
    twin = NullQuantizer()
    twin.annotate = toy().annotate  # type: ignore[method-assign]
    assert groups_of(prepare(program, twin)) == groups_of(prepare(program, toy()))


def test_validate_sees_the_annotated_program(program: torch.export.ExportedProgram) -> None:
    """As in torch's flow, where it comes between `annotate` and the insertion of observers."""
    seen = []

    class Validating(Annotator):
        def validate(self, model: GraphModule) -> None:
            seen.extend(node.name for node in model.graph.nodes if node.meta.get(ANNOTATION_KEY))

    prepare(program, Validating(linears()))
    assert seen == ["linear", "linear_1"]


PEER = {"quant_min": -128, "quant_max": 127, "qscheme": torch.per_tensor_affine, "ch_axis": None}


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        pytest.param(
            SimpleNamespace(
                dtype=torch.int8, observer_or_fake_quant_ctr=max, is_dynamic=False, **PEER
            ),
            QuantizationSpec,
            id="plain",
        ),
        pytest.param(SimpleNamespace(edge_or_node=None), SharedQuantizationSpec, id="shared"),
        pytest.param(
            SimpleNamespace(dtype=torch.int8, scale=0.5, zero_point=3, **PEER),
            FixedQParamsQuantizationSpec,
            id="fixed",
        ),
        pytest.param(
            SimpleNamespace(dtype=torch.int8, derived_from=[], derive_qparams_fn=max, **PEER),
            DerivedQuantizationSpec,
            id="derived",
        ),
    ],
)
def test_specifications_of_other_packages_are_known_by_their_shape(spec: Any, kind: Any) -> None:
    ours = native_spec(spec)
    assert type(ours) is kind
    assert all(getattr(ours, name, value) == value for name, value in vars(spec).items())


def test_what_is_no_specification_is_refused(program: torch.export.ExportedProgram) -> None:
    with pytest.raises(ConfigError, match="expected a quantization specification, got 'int8'"):
        prepare(program, Annotator(linears("int8")))


class Changing(Quantizer):
    """Changes the program where it may only annotate."""

    def __init__(self, change: Callable[[GraphModule], object]) -> None:
        self.change = change

    def annotate(self, model: GraphModule) -> GraphModule:
        self.change(model)
        return model


def _add(model: GraphModule) -> None:
    last = next(iter(reversed(model.graph.nodes)))
    with model.graph.inserting_before(last):
        model.graph.call_function(torch.ops.aten.relu.default, (last.args[0][0],))


def _remove(model: GraphModule) -> None:
    node = next(node for node in model.graph.nodes if node.op == "call_function")
    node.replace_all_uses_with(node.args[0])
    model.graph.erase_node(node)


@pytest.mark.parametrize("change", [_add, _remove], ids=["add", "remove"])
def test_annotate_may_not_change_the_program(change: Callable[[GraphModule], object]) -> None:
    program = export(nn.Sequential(nn.Linear(3, 3)), randn(2, 3))
    with pytest.raises(qompose.UserError, match="Changing: annotate changed the program"):
        prepare(program, Changing(change))


def test_annotate_may_drop_what_nothing_reads() -> None:
    program = export(nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)), randn(2, 3, 4))
    prepare(program, Changing(lambda model: model.graph.eliminate_dead_code()))


def test_errors_of_annotate_name_the_quantizer() -> None:
    program = export(nn.Sequential(nn.Linear(3, 3)), randn(2, 3))
    with pytest.raises(
        qompose.errors.MemberError, match="Changing: annotate raised ZeroDivisionError"
    ):
        prepare(program, Changing(lambda model: 1 / 0))
