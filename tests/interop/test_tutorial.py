# SPDX-License-Identifier: Apache-2.0
"""The worked examples of "How to write a quantizer", with qompose's names imported instead of torchao's.

Each exercise is annotated by the same source text under both names (`toys`). Programs are exported as users
do; torchao's engine gets the strictly exported program, since on the other it finds no functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from tests.core.toy import randn, seeded, sqnr
from tests.interop import toy_backends, toys
from tests.interop.peers import THEIR_WARNINGS, Converted, by_qompose, by_torchao, torchao_quantizer
from tests.interop.twins import with_names_of_torchao
from tests.zoo import by_name

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)

aten = torch.ops.aten
TORCHAOS = {module: with_names_of_torchao(module) for module in (toys, toy_backends)}

Make = Callable[[Any], Any]
"""Makes a quantizer from a module of toys, or from the same file with torchao's names."""


def export(model: nn.Module, inputs: tuple[Tensor, ...], strict: bool) -> Any:
    return torch.export.export(model.eval(), inputs, strict=strict)


def quantized(
    make: Make, model: nn.Module, *inputs: Tensor, names: Any = toys, exactly: bool = True
) -> Converted:
    """Quantized by qompose; a member with torchao's names, and torchao itself, do the same."""
    program = export(model, inputs, strict=False)
    ours = by_qompose(program, make(names), inputs)
    theirs = by_torchao(export(model, inputs, strict=True), make(TORCHAOS[names]), inputs)
    member = by_qompose(program, make(TORCHAOS[names]), inputs)
    for other in (theirs, member):
        assert (ours.quantizes, ours.dequantizes) == (other.quantizes, other.dequantizes)
        if exactly:
            for one, two in zip(ours.outputs, other.outputs, strict=True):
                assert torch.equal(one, two)
    assert torch.equal(theirs.outputs[0], member.outputs[0])
    return ours


def quality(converted: Converted, model: nn.Module, *inputs: Tensor) -> float:
    with torch.no_grad():
        return sqnr(model(*inputs), converted.outputs[0])


def parameters(node: Node) -> tuple[Any, ...]:
    """(scale, zero point, lowest, highest, dtype) of a quantize or dequantize operator per tensor."""
    return tuple(node.args[1:6])


def operand(node: Node, index: int = 0) -> tuple[Any, ...]:
    """The parameters that an operator's operand was quantized with; it reads a dequantize operator."""
    read = node.args[index]
    assert isinstance(read, Node)
    assert ".dequantize_per_tensor" in str(read.target)
    return parameters(read)


def result(node: Node) -> tuple[Any, ...]:
    """The parameters that an operator's result is quantized with, by its only reader."""
    (reader,) = node.users
    assert ".quantize_per_tensor" in str(reader.target)
    return parameters(reader)


def range_of(*tensors: Tensor) -> tuple[float, int]:
    """Scale and zero point of int8 for all values of some tensors, and zero."""
    values = torch.cat([tensor.flatten() for tensor in tensors])
    low, high = values.min().clamp(max=0), values.max().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=2**-12)
    return float(scale), int(-128 - torch.round(low / scale))


def only(converted: Converted, operator: str) -> Node:
    (node,) = converted.calls(operator)
    return node


X, Y = randn(2, 3, 8, 8, seed=1), 3 * randn(2, 3, 8, 8, seed=2)


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


class Pools(nn.Module):
    """Two pools, one a module and one a function, beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.pool(x), F.max_pool2d(y, 2)], 1)


class Squash(nn.Module):
    """Three functions of known range, two of them modules."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid, self.softmax = nn.Sigmoid(), nn.Softmax(-1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.softmax(y) + torch.tanh(x) * self.sigmoid(x)


SUMS = {
    "+": lambda x, y: x + y,
    "torch.add": torch.add,
    "the method": lambda x, y: x.add(y),
}


class TestCommonOperators:
    """Section 1."""

    @pytest.mark.parametrize("name", SUMS)
    def test_sum(self, name: str) -> None:
        model = Apply(SUMS[name])
        if (
            name == "the method"
        ):  # which strict export calls by its name, so that torchao finds no sum
            ours = by_qompose(export(model, (X, Y), strict=False), toys.SumQuantizer(), (X, Y))
        else:
            ours = quantized(lambda names: names.SumQuantizer(), model, X, Y)
        node = only(ours, "add")
        assert operand(node, 0)[:2] == range_of(X)
        assert operand(node, 1)[:2] == range_of(Y)
        assert operand(node, 0)[2:] == (-128, 127, torch.int8)
        assert result(node) not in (operand(node, 0), operand(node, 1))
        assert (ours.quantizes, ours.dequantizes) == (3, 3)
        assert quality(ours, model, X, Y) > 35

    def test_torchao_finds_functions_in_strictly_exported_programs_alone(self) -> None:
        """Why `qompose.program.aten_operators` exists: without a word, nothing is quantized."""
        model = Apply(SUMS["+"])
        for strict, found in ((True, 3), (False, 0)):
            program = export(model, (X, Y), strict)
            assert by_torchao(program, TORCHAOS[toys].SumQuantizer(), (X, Y)).quantizes == found
            assert by_qompose(program, TORCHAOS[toys].SumQuantizer(), (X, Y)).quantizes == 3
            assert by_qompose(program, toys.SumQuantizer(), (X, Y)).quantizes == 3


class TestSharedParameters:
    """Section 2."""

    def test_operands_of_a_sum(self) -> None:
        model = Apply(torch.add)
        ours = quantized(lambda names: names.OneScaleSumQuantizer(), model, X, Y)
        node = only(ours, "add")
        assert operand(node, 0) == operand(node, 1)
        assert operand(node, 0)[:2] == range_of(X, Y)
        assert result(node) != operand(node, 0)
        assert quality(ours, model, X, Y) > 35

    def test_with_the_output_of_a_node(self) -> None:
        model = Apply(lambda x, y: torch.relu(x) - y)
        ours = quantized(lambda names: names.LikeTheProducerQuantizer(), model, X, Y)
        node = only(ours, "sub")
        assert operand(node, 0) == operand(node, 1) == result(only(ours, "relu"))
        assert operand(node, 0)[:2] == range_of(torch.relu(X), Y)
        assert quality(ours, model, X, Y) > 35

    def test_operators_that_give_out_what_they_take_in(self) -> None:
        """Both pools and the concatenation: sharing is transitive."""
        model = Pools()
        ours = quantized(lambda names: names.OneScaleMovesQuantizer(), model, X, Y)
        everything = {parameters(node) for node in ours.calls("quantize_per_tensor")}
        assert {range_of(X, Y)} == {found[:2] for found in everything}
        assert len(everything) == 1
        assert (len(ours.calls("max_pool2d")), len(ours.calls("cat"))) == (2, 1)
        assert (ours.quantizes, ours.dequantizes) == (5, 5)
        assert quality(ours, model, X, Y) > 35


class TestFixedParameters:
    """Section 3."""

    def test_functions_of_known_range(self) -> None:
        model = Squash()
        ours = quantized(lambda names: names.FixedQuantizer(), model, X, Y)
        assert result(only(ours, "sigmoid")) == (1 / 256, 0, 0, 255, torch.uint8)
        assert result(only(ours, "tanh")) == (2 / 256, 128, 0, 255, torch.uint8)
        assert result(only(ours, "softmax")) == (1 / 256, -128, -128, 127, torch.int8)
        assert operand(only(ours, "sigmoid"))[:2] == operand(only(ours, "tanh"))[:2] == range_of(X)
        assert operand(only(ours, "softmax"))[:2] == range_of(Y)
        assert quality(ours, model, X, Y) > 30

    def test_operand_and_result_of_a_sigmoid(self) -> None:
        """Fixed to [0, 1) as in the tutorial: a model whose operands are not in it is clipped."""
        inside, model = X.sigmoid(), Apply(torch.sigmoid)
        ours = quantized(lambda names: names.FixedBothSidesQuantizer(), model, inside)
        assert operand(only(ours, "sigmoid")) == (1 / 256, 0, 0, 255, torch.uint8)
        assert result(only(ours, "sigmoid")) == (1 / 256, 0, 0, 255, torch.uint8)
        assert quality(ours, model, inside) > 50


class TestDerivedParameters:
    """Section 4."""

    @pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
    @pytest.mark.parametrize("per_channel", [False, True], ids=["per tensor", "per channel"])
    def test_bias(self, per_channel: bool, functional: bool) -> None:
        convolution = seeded(nn.Conv2d(3, 4, 3))
        model = Functional(convolution) if functional else convolution
        ours = quantized(lambda names: names.DerivedBiasQuantizer(per_channel), model, X)
        x, weight, bias = (node for node in only(ours, "conv2d").args[:3] if isinstance(node, Node))
        for part, dtype in ((weight, torch.int8), (bias, torch.int32)):
            assert constant(ours, part.args[0]).dtype == dtype
        scale = torch.tensor(x.args[1]) * scales(ours, weight)
        assert torch.equal(scales(ours, bias), scale)
        assert scale.numel() == (4 if per_channel else 1)
        assert torch.all(zero_points(ours, bias) == 0)
        integers = constant(ours, bias.args[0]).double() * scale.double()
        assert convolution.bias is not None
        assert (
            float((integers - convolution.bias.detach().double()).abs().max())
            <= float(scale.max()) / 2 * 1.001
        )
        assert quality(ours, model, X) > 30


class Functional(nn.Module):
    """A convolution called as a function."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.convolution.weight, self.convolution.bias)


def constant(converted: Converted, value: Any) -> Tensor:
    """A number, or the tensor that a get_attr node reads."""
    if isinstance(value, Node):
        assert value.op == "get_attr"
        found: Any = converted.model
        for name in str(value.target).split("."):
            found = getattr(found, name)
        assert isinstance(found, Tensor)
        return found
    return torch.tensor(value)


def scales(converted: Converted, dequantize: Node) -> Tensor:
    return constant(converted, dequantize.args[1])


def zero_points(converted: Converted, dequantize: Node) -> Tensor:
    return constant(converted, dequantize.args[2])


RESNET = by_name("resnet18")
STYLES = ["PartitionsQuantizer", "PatternsQuantizer"]
CONVOLUTIONS, SUMS_IN_RESNET, BLOCK = 8, 3, "3"


def fused(convolution: Node) -> bool:
    """Whether an activation reads the result, and nothing else does."""
    return [str(user.target) for user in convolution.users] in (
        ["aten.relu.default"],
        ["aten.relu_.default"],
    )


def configured(style: str, config: str) -> Make:
    return lambda names: getattr(names, style)().set_global(getattr(names, config)())


class TestResNet18:
    """Section 5, in the style of the example and in the style that the tutorial recommends."""

    @pytest.mark.parametrize("style", STYLES)
    def test_as_torchao_does(self, style: str) -> None:
        model, inputs = RESNET.build(), RESNET.inputs()
        make = configured(style, "config")
        ours = quantized(make, model, *inputs, names=toy_backends)
        convolutions = ours.calls("conv2d")
        assert len(convolutions) == CONVOLUTIONS
        for node in [*convolutions, only(ours, "linear")]:
            assert operand(node)[2:] == (-128, 127, torch.int8)
            weight = node.args[1]
            assert isinstance(weight, Node)
            assert ".dequantize_per_channel" in str(weight.target)
            assert constant(ours, weight.args[0]).dtype == torch.int8
        assert not ours.calls("batch_norm")
        pool = only(ours, "max_pool2d")
        assert operand(pool) == result(pool)
        assert len(ours.calls("add")) == SUMS_IN_RESNET
        assert all(operand(node, 0) and operand(node, 1) for node in ours.calls("add"))
        assert quality(ours, model, *inputs) > 40

    def test_patterns_fuse_activations_and_partitions_do_not(self) -> None:
        found = {}
        for style in STYLES:
            quantizer = configured(style, "config")(toy_backends)
            ours = by_qompose(RESNET.export(), quantizer, RESNET.inputs())
            found[style] = sum(map(fused, ours.calls("conv2d")))
        assert found == {"PartitionsQuantizer": 0, "PatternsQuantizer": 4}

    @pytest.mark.parametrize("style", STYLES)
    def test_histograms(self, style: str) -> None:
        """Each engine's own: members with torchao's are the same as under torchao, ours are as good."""
        model, inputs = RESNET.build(), RESNET.inputs()
        make = configured(style, "histogram_config")
        ours = quantized(make, model, *inputs, names=toy_backends, exactly=False)
        assert quality(ours, model, *inputs) > 40

    @pytest.mark.parametrize("style", STYLES)
    def test_one_module(self, style: str) -> None:
        quantizer = configured(style, "config")(toy_backends).only_in(BLOCK)
        ours = by_qompose(RESNET.export(), quantizer, RESNET.inputs())
        plan = ours.model.meta["qompose"].plan
        anchors = {node for claim in plan.claims for node in claim.nodes}
        inside = [
            n for n in RESNET.export().graph.nodes if qompose.spec.get_module_name_filter(BLOCK)(n)
        ]
        wanted = {n.name for n in inside if n.target in (aten.conv2d.default, aten.add.Tensor)}
        assert len(wanted) == 4
        assert wanted <= anchors
        assert anchors <= {node.name for node in inside}

    @pytest.mark.parametrize("style", STYLES)
    def test_nothing_is_configured(self, style: str) -> None:
        """`None` for a configuration: every helper returns None, and the model stays as it is."""
        with pytest.warns(qompose.QomposeWarning, match="Nothing was quantized"):
            prepared = qompose.prepare_pt2e(RESNET.export(), getattr(toy_backends, style)())
        expected = RESNET.export().module()(*RESNET.inputs())
        assert torch.equal(prepared(*RESNET.inputs()), expected)

    @pytest.mark.parametrize("style", STYLES)
    def test_a_bias_that_stays_float(self, style: str) -> None:
        """The tutorial's configuration has a specification for biases, whose type is float32."""
        model, inputs = RESNET.build(), RESNET.inputs()
        make = configured(style, "config_with_float_bias")
        ours = quantized(make, model, *inputs, names=toy_backends)
        without = by_qompose(RESNET.export(), configured(style, "config")(toy_backends), inputs)
        assert torch.equal(ours.outputs[0], without.outputs[0])
        assert (ours.quantizes, ours.dequantizes) == (without.quantizes, without.dequantizes)

    def test_supported_operators(self) -> None:
        for names in (toy_backends, TORCHAOS[toy_backends]):
            (supported,) = names.PartitionsQuantizer.get_supported_operators()
            assert supported.config == names.config()
            assert [nn.Conv2d, nn.ReLU] in supported.operators


def test_all_that_quantizers_import_is_there() -> None:
    missing = {*torchao_quantizer.__all__} - {*qompose.__all__, *qompose.spec.__all__}
    # Steps of torchao's engine; qompose's has its own.
    assert missing == {"DuplicateDQPass", "PortNodeMetaForQDQ"}
