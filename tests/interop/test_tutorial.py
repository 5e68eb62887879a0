# SPDX-License-Identifier: Apache-2.0
"""The worked examples of "How to write a quantizer", with qompose's names imported instead of torchao's.

A backend's quantizer (`toy_backends`) is the same source text under both names. Programs are exported as
users do; torchao's engine gets the strictly exported program, since on the other it finds no functions.
What its specifications mean, each by itself, is in `test_engine_parity.py` and `test_in_torchao.py`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import sqnr
from tests.interop import toy_backends
from tests.interop.peers import THEIR_WARNINGS, Converted, by_qompose, by_torchao, torchao_quantizer
from tests.zoo import by_name

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)

aten = torch.ops.aten
PACKAGES = ("torchao.quantization.pt2e", "torchao.quantization.pt2e.quantizer")


def with_names_of_torchao(module: ModuleType) -> Any:
    """A module's source with torchao's names imported where it imports qompose's, else as it is."""
    source = Path(str(module.__file__))
    tree = ast.parse(source.read_text(encoding="utf-8"))
    modules = [importlib.import_module(name) for name in PACKAGES]
    names: dict[str, Any] = {}
    for statement in list(tree.body):
        if isinstance(statement, ast.ImportFrom) and statement.module == "qompose":
            tree.body.remove(statement)
            for alias in statement.names:
                home = next(module for module in modules if hasattr(module, alias.name))
                names[alias.name] = getattr(home, alias.name)
    twin = ModuleType(f"{module.__name__}_of_torchao")
    vars(twin).update(names, __file__=str(source))
    exec(compile(tree, str(source), "exec"), vars(twin))
    return twin


TORCHAOS = with_names_of_torchao(toy_backends)

Make = Callable[[Any], Any]
"""Makes a quantizer from a module of toys, or from the same file with torchao's names."""


def quantized(make: Make, model: nn.Module, *inputs: Tensor) -> Converted:
    """Quantized by qompose; a member with torchao's names, and torchao itself, do the same."""
    program, strict = (
        torch.export.export(model, inputs, strict=strict) for strict in (False, True)
    )
    ours = by_qompose(program, make(toy_backends), inputs)
    theirs = by_torchao(strict, make(TORCHAOS), inputs)
    member = by_qompose(program, make(TORCHAOS), inputs)
    for other in (theirs, member):
        assert (ours.quantizes, ours.dequantizes) == (other.quantizes, other.dequantizes)
        for one, two in zip(ours.outputs, other.outputs, strict=True):
            assert torch.equal(one, two)
    return ours


RESNET = by_name("resnet18")


def operand(node: Node, index: int = 0) -> tuple[Any, ...]:
    """(scale, zero point, lowest, highest, dtype) of an operand, which is a dequantize operator's."""
    read = node.args[index]
    assert isinstance(read, Node)
    assert ".dequantize_per_tensor" in str(read.target)
    return tuple(read.args[1:6])


def configured(names: Any) -> Any:
    """With the tutorial's configuration, whose specification for biases has the type float32."""
    return names.ToyQuantizer().set_global(names.config())


class TestResNet18:
    def test_as_torchao_does(self) -> None:
        model, inputs = RESNET.build(), RESNET.inputs()
        ours = quantized(configured, model, *inputs)
        convolutions, linears = ours.calls("conv2d"), ours.calls("linear")
        assert (len(convolutions), len(linears)) == (8, 1)
        for node in [*convolutions, *linears]:
            assert operand(node)[2:] == (-128, 127, torch.int8)
            weight: Any = node.args[1]
            assert ".dequantize_per_channel" in str(weight.target)
            assert ours.model.get_buffer(weight.args[0].target).dtype == torch.int8
        assert not ours.calls("batch_norm")
        (pool,) = ours.calls("max_pool2d")
        (reader,) = pool.users
        assert ".quantize_per_tensor" in str(reader.target)
        assert operand(pool) == tuple(reader.args[1:6])
        assert len(ours.calls("add")) == 3
        assert all(operand(node, 0) and operand(node, 1) for node in ours.calls("add"))
        with torch.no_grad():
            assert sqnr(model(*inputs), ours.outputs[0]) > 40

    def test_one_module(self) -> None:
        quantizer = configured(toy_backends).only_in("3")
        plan = qompose.prepare_pt2e(RESNET.export(), quantizer).meta["qompose"].plan
        anchors = {node for claim in plan.claims for node in claim.nodes}
        within = qompose.spec.get_module_name_filter("3")
        inside = [node for node in RESNET.export().graph.nodes if within(node)]
        wanted = {n.name for n in inside if n.target in (aten.conv2d.default, aten.add.Tensor)}
        assert len(wanted) == 4
        assert wanted <= anchors
        assert anchors <= {node.name for node in inside}

    def test_nothing_is_configured(self) -> None:
        """`None` for a configuration: every helper returns None, and the model stays as it is."""
        with pytest.warns(qompose.QomposeWarning):
            prepared = qompose.prepare_pt2e(RESNET.export(), toy_backends.ToyQuantizer())
        expected = RESNET.export().module()(*RESNET.inputs())
        assert torch.equal(prepared(*RESNET.inputs()), expected)


def test_all_that_quantizers_import_is_there() -> None:
    missing = {*torchao_quantizer.__all__} - {*qompose.__all__, *qompose.spec.__all__}
    # Steps of torchao's engine; qompose's has its own.
    assert missing == {"DuplicateDQPass", "PortNodeMetaForQDQ"}
