# SPDX-License-Identifier: Apache-2.0
"""Products return integers where factors of channels stand before these, and only where that is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import processor, products
from torch import Tensor, fx

pytestmark = pytest.mark.filterwarnings("ignore:An operator in compiled code:UserWarning")

OPS, ATEN = torch.ops.qompose_x86, torch.ops.aten
QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
SHAPES = {"linear": (2, 5, 8), "conv2d": (2, 8, 3, 8), "depthwise": (2, 8, 3, 4)}


@pytest.fixture(autouse=True)
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any processor: what is not compiled runs on torch's operators. Weights have seven bits for AVX2."""
    monkeypatch.setattr(processor, "isa", lambda: processor.AVX2)


class WithVals(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def program(
    kind: str,
    factors: Tensor,
    *,
    gelu: bool = True,
    bounds: tuple[int, int] = (0, 255),
    read_twice: bool = False,
) -> tuple[fx.GraphModule, Tensor]:
    """A product, gelu, mul, quantize; and an input."""
    torch.manual_seed(0)
    groups = 8 if kind == "depthwise" else 1
    shape = (8, 8 // groups) if kind == "linear" else (8, 8 // groups, 1, 1)
    root = torch.nn.Module()
    values = {
        "weight": torch.randint(-60, 60, shape, dtype=torch.int8),
        "w_scale": torch.rand(8) / 50,
        "bias": torch.randn(8),
        "factors": factors,
    }
    for name, value in values.items():
        root.register_buffer(name, value)
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight, w_scale, bias, vector = map(graph.get_attr, values)
    geometry = ([1, 1], [0, 0], [1, 1], groups) if kind != "linear" else ()
    after = ("gelu", [], "none") if gelu else ()
    operator = OPS.linear.default if kind == "linear" else OPS.conv2d.default
    arguments = (x, 0.03, 110, weight, w_scale, bias, *geometry, 1.0, 0, None, *after)
    y = graph.call_function(operator, arguments)
    scaled = graph.call_function(ATEN.mul.Tensor, (y, vector))
    integers = graph.call_function(QUANTIZE, (scaled, 0.02, 20, *bounds, torch.uint8))
    graph.output((integers, y) if read_twice else integers)
    result = fx.GraphModule(root, graph)
    given = torch.randint(0, 256, SHAPES[kind], dtype=torch.uint8)
    WithVals(result).run(given)
    return result, given


def is_fused(model: fx.GraphModule) -> bool:
    targets = [node.target for node in model.graph.nodes]
    assert any(
        {products.PRODUCT, products.DEPTHWISE} & {*node.args[:1]} for node in model.graph.nodes
    )
    return ATEN.mul.Tensor not in targets and QUANTIZE not in targets


def varied(*shape: int) -> Tensor:
    return torch.linspace(0.4, 2.5, 8).reshape(shape)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("linear", (8,)), ("linear", (1, 1, 8)), ("conv2d", (8, 1, 1)), ("depthwise", (1, 8, 1, 1))],
)
def test_factors_join_a_product(kind: str, shape: tuple[int, ...]) -> None:
    model, x = program(kind, varied(*shape))
    before, fused = model(x), with_prepack_in_graph(model)
    assert is_fused(fused)
    after = fused(x)
    assert after.dtype == torch.uint8
    apart = (after.int() - before.int()).abs()
    assert int(apart.max()) <= 1  # what lies in the middle between two
    assert float((apart > 0).double().mean()) < 0.02
    assert before.unique().numel() > 20


@pytest.mark.parametrize(
    ("kind", "factors", "choices"),
    [
        pytest.param("linear", varied(8), {"read_twice": True}, id="floats are read too"),
        pytest.param("linear", varied(8), {"bounds": (0, 200)}, id="narrower bounds"),
        pytest.param("linear", varied(8), {"gelu": False}, id="without a function"),
        pytest.param("linear", torch.rand(5, 1), {}, id="factors of rows"),
        pytest.param("linear", torch.rand(()), {}, id="a number"),
        pytest.param("linear", torch.rand(1, 1, 1, 8), {}, id="results of more dimensions"),
        pytest.param("conv2d", torch.rand(8), {}, id="factors of columns"),
        pytest.param("conv2d", torch.rand(8, 3, 1), {}, id="factors of channels and rows"),
    ],
)
def test_what_is_not_the_same_stays(kind: str, factors: Tensor, choices: dict[str, Any]) -> None:
    model, x = program(kind, factors, **choices)
    before, left = model(x), with_prepack_in_graph(model)
    assert not is_fused(left)
    torch.testing.assert_close(left(x), before, atol=1, rtol=0)
