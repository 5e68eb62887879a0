# SPDX-License-Identifier: Apache-2.0
"""How lowered graphs are called: no trees are walked where there are none, and the same comes out."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qompose.program.call_signature import call_directly
from qompose.program.graph import copy_graph_module, refresh
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

TREES = ("fx_pytree.tree_flatten_spec", "pytree.tree_unflatten")


class Calls(nn.Module):
    """A module whose call is the function it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


class Named(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> Tensor:
        return x * scale + shift


class Nested(nn.Module):
    def forward(self, x: Tensor, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return x * pair[0] + pair[1]["shift"]


X, Y, Z = torch.arange(3.0), torch.ones(3), torch.full((3,), 2.0)


def direct(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    exported = torch.export.export(model, args, kwargs).module()
    assert isinstance(exported, GraphModule)
    graph = refresh(copy_graph_module(exported))
    call_directly(graph)
    return graph


def walked(graph: GraphModule) -> list[str]:
    return [tree for tree in TREES if tree in graph.code]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x, y: x + y, []),
        (lambda x, y: (x + y, x - y), []),
        (lambda x, y: (x + y,), []),
        (lambda x, y: (x, x), []),
        (lambda x, y: [x + y, x - y], TREES[1:]),
        (lambda x, y: {"sum": x + y, "rest": (x, y)}, TREES[1:]),
        (lambda x, y: (x + y, None, 3), []),
        (lambda x, y: x + 1, []),
    ],
)
def test_results(function: Callable[..., Any], left: tuple[str, ...]) -> None:
    model = Calls(function)
    graph = direct(model, (X, Y))
    assert walked(graph) == list(left)
    found, wanted = graph(X, Y), model(X, Y)
    assert pytree.tree_structure(found) == pytree.tree_structure(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(graph(x=X, y=Y), wanted, rtol=0, atol=0)


def test_arguments_by_name_in_any_order() -> None:
    graph = direct(Named(), (X,), {"scale": Y, "shift": Z})
    assert not walked(graph)
    assert torch.equal(graph(X, shift=Z, scale=Y), X + 2)


def test_arguments_in_trees_are_flattened_as_before() -> None:
    graph = direct(Nested(), (X, (Y, {"shift": Z})))
    assert walked(graph) == [TREES[0]]
    assert torch.equal(graph(X, (Y, {"shift": Z})), X + 2)


@pytest.mark.parametrize("call", [lambda m: m(X), lambda m: m(X, Y, Z), lambda m: m(X, z=Y)])
def test_wrong_arguments_are_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="argument"):
        call(direct(Calls(lambda x, y: x + y), (X, Y)))


def pickled(graph: GraphModule) -> Any:
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copies of trees
@pytest.mark.parametrize("made", [copy.deepcopy, pickled])
def test_copies(made: Callable[[GraphModule], Any]) -> None:
    graph = direct(Calls(lambda x, y: (x + y, x - y)), (X, Y))
    torch.testing.assert_close(made(graph)(X, Y), (X + Y, X - Y), rtol=0, atol=0)


def test_hooks_and_tracebacks_are_those_of_any_module(capsys: pytest.CaptureFixture[str]) -> None:
    graph = direct(Calls(lambda x, y: x @ y), (X, Y))
    seen = []
    graph.register_forward_hook(lambda module, args, result: seen.append(result))
    graph(X, Y)
    assert torch.equal(seen[0], X @ Y)
    with pytest.raises(RuntimeError) as raised:
        graph(X, Y.long())
    code = [
        str(entry.statement) for entry in raised.traceback if "eval_with_key" in str(entry.path)
    ]
    assert "torch.matmul(x, y)" in code[-1]
    assert not capsys.readouterr().err


def test_exported_and_compiled_again() -> None:
    graph = direct(Calls(lambda x, y: (x + y, x - y)), (X, Y))
    again = torch.export.export(graph, (X, Y)).module()
    torch.testing.assert_close(again(X, Y), (X + Y, X - Y), rtol=0, atol=0)
    compiled = torch.compile(graph, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, Y), (X + Y, X - Y), rtol=0, atol=0)
