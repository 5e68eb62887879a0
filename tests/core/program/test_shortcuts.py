# SPDX-License-Identifier: Apache-2.0
"""Shorter ways in generated code: the same tensors and operators, whatever becomes of the module."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from qompose.program.call_signature import _function, call_directly
from qompose.program.graph import copy_graph_module, refresh
from torch import Tensor, nn
from torch.fx import GraphModule

aten = torch.ops.aten
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Model(nn.Module):
    """A parameter in a list, a buffer in an inner module, and operators with one and several overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).relu()).matmul(self.layers[0].weight).sum(1)


def lowered() -> Any:
    torch.manual_seed(0)
    exported = torch.export.export(Model().eval(), (X,)).module()
    assert isinstance(exported, GraphModule)
    graph = refresh(copy_graph_module(exported))
    call_directly(graph)
    return graph


def test_the_code_goes_to_tensors_and_functions_directly() -> None:
    code = lowered().code
    for short in (
        "= self._modules['layers']._modules['0']._parameters['weight']",
        "= self._modules['layers']._modules['1']._buffers['shift']",
        "= torch.relu(", "= torch.matmul(",
    ):  # fmt: skip
        assert short in code
    for long in ("torch.ops.aten.add.Tensor(", "torch.ops.aten.sum.dim_IntList("):
        assert long in code


def test_it_computes_what_the_graph_says() -> None:
    graph = lowered()
    assert torch.equal(graph(X), torch.fx.Interpreter(graph).run(X))


def test_tensors_that_are_replaced_later() -> None:
    graph, x = lowered(), X.double()
    before = graph(X)
    assert torch.allclose(graph.double()(x), before.double())
    graph.load_state_dict({"layers.0.weight": torch.eye(4).double()}, strict=False, assign=True)
    torch.testing.assert_close(graph(x), (x.relu() + torch.arange(4.0)).sum(1))
    zeros = {"layers.0.weight": torch.zeros(4, 4).double()}
    assert not torch.func.functional_call(graph, zeros, (x,)).any()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copies of trees
def test_copies_have_tensors_of_their_own() -> None:
    graph, file = lowered(), io.BytesIO()
    wanted = graph(X)
    torch.save(graph, file)
    file.seek(0)
    for other in (copy.deepcopy(graph), torch.load(file, weights_only=False)):
        assert torch.equal(other(X), wanted)
        other.load_state_dict({"layers.0.weight": torch.zeros(4, 4)}, strict=False)
        assert not other(X).any() and torch.equal(graph(X), wanted)


def test_exported_again_parameters_and_buffers_are_what_they_were() -> None:
    graph = lowered()
    again = torch.export.export(graph, (X,))
    assert [*again.graph_signature.parameters] == ["layers.0.weight"]
    assert [*again.graph_signature.buffers] == ["layers.1.shift"]
    assert torch.equal(again.module()(X), graph(X))
    for options in ({"backend": "eager", "fullgraph": True}, {"backend": "aot_eager"}):
        torch.testing.assert_close(torch.compile(graph, **options)(X), graph(X))


def test_an_attribute_that_is_neither_parameter_nor_buffer_is_found_as_before() -> None:
    graph = lowered()
    weight = graph.layers.get_submodule("0").weight.detach()
    del graph.layers.get_submodule("0").weight
    graph.layers.get_submodule("0").weight = weight
    graph.recompile()
    assert "_parameters" not in graph.code
    assert torch.equal(graph(X), torch.fx.Interpreter(graph).run(X))


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (aten.index_select.default, "index_select"),
        (aten.matmul.default, "matmul"),
        (aten.add.Tensor, None),  # torch.add chooses among several
        (aten.index_select.out, None),
        (aten.split.Tensor, None),  # torch.split is Python, and gives several
        (aten.arange.default, None),  # of no tensor
        (aten.linear.default, None),  # torch has none
        (torch.ops.quantized.embedding_bag_byte_unpack.default, None),
    ],
    ids=str,
)
def test_operators_that_a_function_calls_alone(operator: Any, name: str | None) -> None:
    assert _function(operator) == name
