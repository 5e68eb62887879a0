# SPDX-License-Identifier: Apache-2.0
"""Our attention reads keys and values that heads share as they are, and no copy for each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qompose_x86_inductor.inductor import native_float_attention
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import processor
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import Model, sqnr

pytestmark = [
    pytest.mark.skipif(processor.of_machine() is None, reason="the C++ is not for this processor"),
    pytest.mark.filterwarnings("ignore:An operator in compiled code falls back:UserWarning"),
]
SHARED, GROUP, WIDTH, LENGTH = 2, 2, 8, 20
Copy = Callable[[Tensor], Tensor]


def in_groups(x: Tensor) -> Tensor:
    """As transformers has it."""
    copied = x[:, :, None].expand(1, SHARED, GROUP, LENGTH, WIDTH)
    return copied.reshape(1, -1, LENGTH, WIDTH)


def in_another_order(x: Tensor) -> Tensor:
    """Query heads 0 and 2 read the first head of the keys."""
    return x[:, None].expand(1, GROUP, SHARED, LENGTH, WIDTH).reshape(1, -1, LENGTH, WIDTH)


def doubled(x: Tensor) -> Tensor:
    return in_groups(x * 2)


def given(queries: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(queries)
    return torch.randn(1, SHARED * GROUP, queries, WIDTH), torch.randn(1, SHARED, 3, WIDTH)


def exported(forward: Callable[..., Tensor], queries: int) -> GraphModule:
    """A graph with a cache of keys, which are its values too."""
    cache = nn.Buffer(torch.randn(1, SHARED, LENGTH, WIDTH))
    program = torch.export.export(Model(forward, cache=cache), given(queries))
    return program.module(check_guards=False)


def keys_read(graph: GraphModule) -> int:
    """Return the heads of the keys that our attention reads, in what is for the compiler."""
    (call,) = (
        node
        for node in with_prepack_in_graph(graph).graph.nodes
        if node.target is native_float_attention.attended
    )
    return int(call.args[1].meta["val"].shape[1])


def attended(copy_keys: Copy, copy_values: Copy) -> Callable[..., Tensor]:
    def forward(m: Any, query: Tensor, new: Tensor) -> Tensor:
        m.cache.index_copy_(2, torch.tensor([3, 7, 9]), new)
        return F.scaled_dot_product_attention(query, copy_keys(m.cache), copy_values(m.cache))

    return forward


@pytest.mark.parametrize("queries", [1, native_float_attention.FEW_QUERIES, 60])
def test_shared_heads_are_read_as_they_are(queries: int) -> None:
    graph = exported(attended(in_groups, in_groups), queries)
    assert keys_read(graph) == SHARED
    assert sqnr(graph(*given(queries)), with_prepack_in_graph(graph)(*given(queries))) > 100


@pytest.mark.parametrize(
    ("copy_keys", "copy_values"),
    [(in_another_order, in_another_order), (in_groups, in_another_order)],
    ids=["another order", "values in another order"],
)
def test_what_is_arranged_otherwise_stays_a_copy(copy_keys: Copy, copy_values: Copy) -> None:
    assert keys_read(exported(attended(copy_keys, copy_values), 1)) == SHARED * GROUP


def test_what_is_computed_is_read_before_its_copies() -> None:
    graph = exported(attended(doubled, in_groups), 1)
    assert keys_read(graph) == SHARED
    assert sqnr(graph(*given(1)), with_prepack_in_graph(graph)(*given(1))) > 100


def test_a_copy_of_what_is_written_to_afterwards_stays() -> None:
    def forward(m: Any, query: Tensor, new: Tensor) -> Tensor:
        copied = in_groups(m.cache)
        m.cache.index_copy_(2, torch.tensor([3, 7, 9]), new)
        return F.scaled_dot_product_attention(query, copied, copied)

    assert keys_read(exported(forward, 1)) == SHARED * GROUP
