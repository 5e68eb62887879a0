# SPDX-License-Identifier: Apache-2.0
"""Running some of a program's operators on values of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose.program.graph import copy_graph_module
from qompose.quantizer.interop.execution import SEED, NotRunnable, random_like, run
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from tests.core.toy import export


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


@pytest.mark.parametrize(
    "example",
    [
        torch.empty(3, 4),
        torch.empty(4, 3).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(1, 4).expand(3, 4),
        torch.empty(0, 4),
        torch.empty(()),
        torch.empty(3, 4, dtype=torch.bfloat16),
        torch.empty(3, 4, dtype=torch.complex64),
        torch.empty(3, 4, dtype=torch.int64),
        torch.empty(3, 4, dtype=torch.bool),
    ],
    ids=lambda example: f"{example.dtype} {tuple(example.shape)} {example.stride()}",
)
def test_random_values_are_of_the_kind_of_the_example(example: Tensor) -> None:
    value = random_like(example, generator(), 0.5)
    assert (value.shape, value.stride(), value.dtype) == (
        example.shape,
        example.stride(),
        example.dtype,
    )
    assert torch.equal(value, random_like(example, generator(), 0.5))
    if not (value.is_floating_point() or value.is_complex()):
        assert set(value.flatten().tolist()) <= {0, 1}


def test_rows_are_of_two_sizes() -> None:
    rows = random_like(torch.empty(2, 1000), generator(), 0.5)
    small, large = rows.square().mean(1).sqrt()
    assert 0.9 < small < 1.1 and 7 < large < 9


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_masks_have_a_share_of_ones(share: float) -> None:
    mask = random_like(torch.empty(1000, dtype=torch.bool), generator(), share)
    assert abs(mask.float().mean() - share) < 0.05


def test_several_values_and_numbers() -> None:
    values = random_like((torch.empty(2), 3), generator(), 0.5)
    assert values[0].shape == (2,) and values[1] == 3
    with pytest.raises(NotRunnable, match="recorded no value"):
        random_like(None, generator(), 0.5)


class Writing(nn.Module):
    """Updates statistics, draws random numbers, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return nn.functional.dropout(self.norm(x), 0.5, self.training)


def nodes_of(program: GraphModule) -> tuple[Node, ...]:
    return tuple(node for node in program.graph.nodes if node.op == "call_function")


def test_nothing_changes_but_the_result() -> None:
    x = torch.randn(8, 3)
    module = torch.export.export(Writing().train(), (x.clone(),)).module(check_guards=False)
    assert isinstance(module, GraphModule)
    program = copy_graph_module(module)
    nodes, given = nodes_of(program), next(n for n in program.graph.nodes if n.op == "placeholder")
    original = x.clone()
    buffers = {name: value.clone() for name, value in program.named_buffers()}
    result: Any = None
    for _ in range(2):
        torch.rand(1)
        random = torch.get_rng_state()
        values = run(nodes, {given: x}, [nodes[-1]])
        assert torch.equal(torch.get_rng_state(), random)
        assert result is None or torch.equal(values[nodes[-1]], result), (
            "the same numbers are drawn"
        )
        result = values[nodes[-1]]
    assert torch.equal(x, original)
    assert result.count_nonzero() not in (0, result.numel())
    for name, value in program.named_buffers():
        assert torch.equal(value, buffers[name])
    program(x.clone())
    assert not torch.equal(program.get_buffer("norm.running_mean"), buffers["norm.running_mean"])


def test_constants_that_share_memory_share_it() -> None:
    """Two nodes read one buffer, and one is written to."""
    buffer, graph = torch.zeros(3), Graph()
    first, second = graph.get_attr("first"), graph.get_attr("second")
    written = graph.call_function(torch.ops.aten.add_.Tensor, (first, 1.0))
    read = graph.call_function(torch.ops.aten.mul.Tensor, (second, 2.0))
    graph.output((read,))
    root = nn.Module()
    root.register_buffer("first", buffer)
    root.register_buffer("second", buffer[:])
    GraphModule(root, graph)
    assert run((written, read), {}, [read])[read].tolist() == [2.0] * 3
    assert buffer.tolist() == [0.0] * 3


def test_a_loop_that_might_not_end_is_not_run() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    loop = graph.call_function(torch.ops.higher_order.while_loop, (None, None, (x,), ()))
    with pytest.raises(NotRunnable, match="while_loop might not end"):
        run((loop,), {x: torch.ones(2)}, [loop])


def test_an_operator_that_fails_is_named() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    program = export(Product(), torch.randn(3, 3)).module(check_guards=False)
    (node,) = nodes_of(program)
    with pytest.raises(NotRunnable, match="matmul failed"):
        run((node,), {node.args[0]: torch.randn(2, 3)}, [node])
