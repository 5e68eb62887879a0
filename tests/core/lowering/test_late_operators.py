# SPDX-License-Identifier: Apache-2.0
"""Operators that are replaced behind the passes of torch's compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from qompose.lowering.compilation import LateReplacement, settings_with
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

PASSES = "post_grad_custom_post_pass"
NOTHING = GraphModule({}, Graph())
pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


@pytest.fixture
def late() -> Iterator[Any]:
    """An operator that doubles, and fails where it is run."""
    library = torch.library.Library("qompose_test_late", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    torch.library.register_fake(
        "qompose_test_late::double", lambda x: torch.empty_like(x), lib=library
    )
    yield torch.ops.qompose_test_late.double.default
    library._destroy()
    torch._dynamo.reset()


def doubled(node: Node) -> None:
    with node.graph.inserting_before(node):
        call = node.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 2.0))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def tripled(node: Node) -> None:
    doubled(node)


def run(late: Any, settings: dict[str, Any]) -> Tensor:
    def function(x: Tensor) -> Tensor:
        result: Tensor = late(x + 1) + late(x)
        return result

    with (
        torch.no_grad(),
        torch._inductor.config.patch(settings),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        compiled = torch.compile(function)(torch.arange(3.0))
        assert isinstance(compiled, Tensor)
        return compiled


def test_they_are_replaced(late: Any) -> None:
    assert run(late, settings_with(NOTHING, {late: doubled}, {})).tolist() == [2.0, 6.0, 10.0]


class Seen(CustomGraphPass):
    def __init__(self) -> None:
        self.targets: list[set[Any]] = []

    def __call__(self, graph: Graph) -> None:
        self.targets.append({node.target for node in graph.nodes})

    def uuid(self) -> Any:
        return None


@pytest.mark.parametrize("given", ["option", "setting"])
def test_passes_of_the_user_run_before(late: Any, given: str) -> None:
    seen = Seen()
    if given == "option":
        settings = settings_with(NOTHING, {late: doubled}, {PASSES: seen})
    else:
        with torch._inductor.config.patch({PASSES: seen}):
            settings = settings_with(NOTHING, {late: doubled}, {})
    assert run(late, settings).tolist() == [2.0, 6.0, 10.0]
    assert [late in targets for targets in seen.targets] == [True]


def test_without_any_nothing_is_set() -> None:
    assert settings_with(NOTHING, {}, {"freezing": True}) == {"freezing": True}


def test_code_is_kept_apart_by_the_functions_that_made_it(late: Any) -> None:
    other = torch.ops.aten.relu.default
    passes = [LateReplacement(o) for o in ({late: doubled}, {late: doubled}, {other: doubled})]
    one, same, different = (p.uuid() for p in passes)
    assert one == same != different
    assert LateReplacement({late: tripled}).uuid() != one
