# SPDX-License-Identifier: Apache-2.0
"""Compiled programs read caches of integers by C++ of our own, where heads are shared in groups too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as config,
)
from qompose_x86_inductor.inductor import native_cache, native_calls
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import cache_attention, processor
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import Model, export, seeded, sqnr

pytestmark = [
    pytest.mark.usefixtures("nothing_is_kept"),
    pytest.mark.skipif(processor.of_machine() is None, reason="the C++ is not for this processor"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
SHARED, GROUP, WIDTH, LENGTH = 2, 2, 16, 60
Attend = Callable[..., Tensor]


def grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def expanded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As transformers has it."""
    key, value = (
        x[:, :, None].expand(1, SHARED, GROUP, LENGTH, WIDTH).reshape(1, -1, LENGTH, WIDTH)
        for x in (key, value)
    )
    return F.scaled_dot_product_attention(query, key, value, mask)


def in_another_order(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Query heads 0 and 2 read the first head of the keys."""
    key, value = (
        x[:, None].expand(1, GROUP, SHARED, LENGTH, WIDTH).reshape(1, -1, LENGTH, WIDTH)
        for x in (key, value)
    )
    return F.scaled_dot_product_attention(query, key, value, mask)


def of_a_part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return grouped(query, key[:, :, :50], value[:, :, :50], mask[:, :50])


def changed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return grouped(query, key * 2, value, mask)


def of_three_texts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Which torch's attention lets read one cache."""
    return grouped(query.expand(3, -1, -1, -1), key, value, mask)


def of_one_head(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Which torch's attention lets read each head of the cache."""
    return F.scaled_dot_product_attention(query[:, :1], key, value, mask)


def of_keys_as_values(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return grouped(query, key, key, mask)


def given(first: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(first)
    return torch.randn(1, size, 8, generator=generator), torch.arange(first, first + size)


def lowered(attend: Attend, size: int = 1) -> GraphModule:
    def forward(m: Any, x: Tensor, at: Tensor) -> Tensor:
        count = SHARED * (GROUP + 2)
        rows = m.linear(x).view(1, len(at), count, WIDTH).transpose(1, 2)
        query, key, value = rows.split([SHARED * GROUP, SHARED, SHARED], 1)
        m.keys.index_copy_(2, at, key)
        m.values.index_copy_(2, at, value)
        return attend(query, m.keys, m.values, torch.arange(LENGTH) <= at[:, None])

    cache = torch.zeros(1, SHARED, LENGTH, WIDTH)
    model = Model(
        forward, linear=nn.Linear(8, SHARED * (GROUP + 2) * WIDTH),
        keys=nn.Buffer(cache.clone()), values=nn.Buffer(cache.clone()),
    )  # fmt: skip
    alone = config(weight_only=True, cache=True).without("weight")
    program = export(seeded(model, size=0.3), *given(0, size))
    prepared = qompose.prepare_pt2e(program, X86InductorQuantizer().set_global(alone))
    return qompose.lower(qompose.convert_pt2e(prepared))


def calls(graph: GraphModule) -> int:
    for form in (graph, with_prepack_in_graph(graph)):
        targets = [node.target for node in form.graph.nodes]
        found = targets.count(cache_attention.ATTENTION)
        assert found == 0 or native_calls.options(graph)["cpp_wrapper"]
        floats = targets.count(torch.ops.aten.mul_.Tensor)
        assert floats == (0 if found else 2)
    return found


@pytest.mark.parametrize("attend", [grouped, expanded])
def test_few_queries_read_integers(attend: Attend) -> None:
    assert calls(lowered(attend)) == 1


def test_keys_that_are_values_too_are_read_once() -> None:
    targets = [node.target for node in lowered(of_keys_as_values).graph.nodes]
    assert targets.count(cache_attention.ATTENTION) == 1


@pytest.mark.parametrize(
    "attend", [in_another_order, of_a_part, changed, of_three_texts, of_one_head]
)
def test_what_is_not_the_cache_is_read_as_floats(attend: Attend) -> None:
    assert calls(lowered(attend)) == 0


@pytest.mark.parametrize("queries", [native_cache.TOO_MANY_QUERIES, 50])
def test_many_queries_read_floats(queries: int) -> None:
    assert calls(lowered(grouped, queries)) == 0


@pytest.mark.usefixtures("by_onednn")
def test_without_our_code_it_is_torchs() -> None:
    assert calls(lowered(grouped)) == 0


def test_lowered_with_our_code_and_compiled_without_it_is_torchs() -> None:
    graph = lowered(expanded)
    with processor.used_if(False):
        plain = with_prepack_in_graph(graph)
    assert cache_attention.ATTENTION not in {node.target for node in plain.graph.nodes}
    assert sqnr(graph(*given(0, 1)), plain(*given(0, 1))) > 60


@pytest.mark.parametrize("mode", ["default", pytest.param("package", marks=pytest.mark.full)])
def test_compiled(mode: str) -> None:
    model = lowered(expanded)
    run = qompose.compile_lowered(model, mode)
    for step in range(20):
        expected = model(*given(step, 1))
        assert sqnr(expected, run(*given(step, 1))) > 60
