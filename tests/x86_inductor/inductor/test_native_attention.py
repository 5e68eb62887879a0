# SPDX-License-Identifier: Apache-2.0
"""Compiled programs hold attention of our own, and compute what the lowered model computes."""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_x86_inductor.inductor import native_attention, native_calls, native_float_attention
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import processor
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from tests.core.toy import Model
from tests.products import x86
from tests.sampling import at_once

pytestmark = [
    pytest.mark.usefixtures("nothing_is_kept"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
needs_vnni = pytest.mark.skipif(
    processor.of_machine() is not processor.AVX512_VNNI, reason="no AVX-512 VNNI, or AMX beside it"
)
HEADS, SHARED, WIDTH, COUNT = 4, 2, 8, 32
Attend = Callable[..., Tensor]


def net(attend: Attend) -> nn.Module:
    """Queries, keys and values from one linear, whose heads keys and values share in twos."""

    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        packed = m.packed(x).view(x.shape[0], x.shape[1], HEADS + 2 * SHARED, WIDTH)
        query, key, value = packed.transpose(1, 2).split([HEADS, SHARED, SHARED], 1)
        return m.out(attend(query, key, value, mask).transpose(1, 2).reshape(x.shape))

    torch.manual_seed(0)
    return Model(forward, packed=nn.Linear(COUNT, 2 * COUNT), out=nn.Linear(COUNT, COUNT))


def operator(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query[:, ::2], key, value, is_causal=True).repeat(
        1, 2, 1, 1
    ) + mask[..., :1].to(query)


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query[:, :SHARED] @ key.transpose(2, 3) / 3
    weights = torch.softmax(scores + mask, -1)
    return torch.cat([weights @ value, query[:, SHARED:]], 1)


def inputs(batch: int, length: int, *, floats: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(batch * length)
    kept = torch.rand(batch, 1, length, length) < 0.7
    mask = torch.zeros(kept.shape).masked_fill(~kept, -30.0) if floats else kept
    return torch.randn(batch, length, COUNT), mask


def lowered(attend: Attend, *, floats: bool) -> GraphModule:
    """For any batch and length."""
    batch, length = Dim("batch", max=64), Dim("length", max=99)
    result = qompose.quantize(
        net(attend).eval(), inputs(4, 9, floats=floats),
        backends=x86(attention=True, range="minmax", algorithms=(), balance=False),
        calibration=[inputs(4, 9, floats=floats)], progress=False,
        dynamic_shapes=({0: batch, 1: length}, {0: batch, 2: length, 3: length}),
    ).model  # fmt: skip
    assert isinstance(result, GraphModule)
    assert "attention" in str(result.code)
    return result


def assert_same(run: Callable[..., Tensor], model: Callable[..., Tensor], *, floats: bool) -> None:
    """Up to a few integers that lie in the middle between two, and their share in what follows."""
    for batch, length in ((4, 9), (2, 5), (3, 40)):
        given = inputs(batch, length, floats=floats)
        expected = model(*given)
        assert (run(*given) - expected).norm() / expected.norm() < 0.01


@needs_vnni
@pytest.mark.parametrize(
    ("attend", "floats", "mode"),
    at_once(
        [
            (attend, floats, mode)
            for attend, floats in (
                (operator, True),
                (operator, False),
                (causal, False),
                (written_out, True),
            )
            for mode in ("package", "default")
        ],
        (operator, False, "default"),
    ),
)
def test_any_batch_and_length(attend: Attend, floats: bool, mode: str, tmp_path: Path) -> None:
    model = lowered(attend, floats=floats)
    path = tmp_path / "model.pt2" if mode == "package" else None
    assert_same(qompose.compile_lowered(model, mode, path=path), model, floats=floats)
    if path is not None:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
            code = "".join(archive.read(name).decode() for name in names)
        assert code.count("aoti_torch_cpu_native_attention(") == 2  # and a declaration


@pytest.mark.full
@pytest.mark.parametrize(("attend", "floats"), [(operator, False), (written_out, True)])
def test_without_our_code_it_is_torchs(attend: Attend, floats: bool, by_onednn: None) -> None:
    model = lowered(attend, floats=floats)
    assert_same(qompose.compile_lowered(model), model, floats=floats)


@needs_vnni
def test_a_program_of_nothing_but_attention() -> None:
    module = Model(lambda m, x: F.scaled_dot_product_attention(x, x, x))
    x = torch.randn(2, 5, 8)
    prepared = qompose.prepare_pt2e(
        torch.export.export(module, (x,)), x86(attention=True, range="minmax")
    )
    prepared(x)
    graph = qompose.lower(qompose.convert_pt2e(prepared))
    assert native_calls.options(graph)["cpp_wrapper"]
    targets = [node.target for node in with_prepack_in_graph(graph).graph.nodes]
    assert targets.count(native_attention.attended) == 1


def means(m: Any, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Attention of four axes behind a linear, with options of torch's."""
    packed = m.packed(x).view(x.shape[0], x.shape[1], HEADS + 2 * SHARED, WIDTH)
    query, key, value = packed.transpose(1, 2).split([HEADS, SHARED, SHARED], 1)
    found = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, **options)
    return found.transpose(1, 2).reshape(x.shape)


def in_float(**options: Any) -> Callable[..., Tensor]:
    """Attention between two linears."""
    return lambda m, x: m.out(means(m, x, **options))


def in_three_ways(m: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Attention with a mask, without one, and written out, each with a linear behind it."""
    query = m.packed(x)[..., None, :COUNT].transpose(1, 2)
    scores = query @ query.mT / 3
    scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    written = (scores.softmax(-1) @ query)[:, 0]
    return m.out(means(m, x, mask)), m.out(means(m, x, is_causal=True, scale=0.1)), m.out(written)


def left_in_float(
    forward: Callable[..., Any], *given: Tensor, dynamic: bool = False
) -> GraphModule:
    """A lowered model whose attention stays in float."""
    torch.manual_seed(0)
    module = Model(forward, packed=nn.Linear(COUNT, 2 * COUNT), out=nn.Linear(COUNT, COUNT))
    batch, length = Dim("batch", max=64), Dim("length", max=99)
    shapes = ({0: batch, 1: length}, {0: batch, 2: length, 3: length})[: len(given)]
    model = qompose.quantize(
        module.eval(), given, backends=x86(), calibration=[given], progress=False,
        dynamic_shapes=shapes if dynamic else None,
    ).model  # fmt: skip
    assert isinstance(model, GraphModule)
    return model


def calls_in_float(model: GraphModule) -> int:
    """Return how many calls of our attention in float a model for the compiler has."""
    targets = [node.target for node in with_prepack_in_graph(model).graph.nodes]
    assert bool(native_calls.options(model))
    return targets.count(native_float_attention.attended)


needs_native = pytest.mark.skipif(
    processor.of_machine() is None, reason="the C++ is not for this processor"
)


@needs_native
@pytest.mark.parametrize(
    ("floats", "mode"),
    at_once(itertools.product((False, True), ("default", "package")), (False, "default")),
)
def test_attention_in_float(floats: bool, mode: str, tmp_path: Path) -> None:
    model = left_in_float(in_three_ways, *inputs(4, 50, floats=floats), dynamic=True)
    assert calls_in_float(model) == 3
    path = tmp_path / "model.pt2" if mode == "package" else None
    compiled = qompose.compile_lowered(model, mode, path=path)
    for part in range(3):
        assert_same(
            lambda *given, part=part: compiled(*given)[part],
            lambda *given, part=part: model(*given)[part],
            floats=floats,
        )


@needs_native
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_causal_attention_in_float_of_one_length(compiled: bool) -> None:
    x = inputs(2, 60, floats=True)[0]
    model = left_in_float(in_float(is_causal=True, scale=0.1), x)
    assert calls_in_float(model) == 1
    if compiled:
        expected = model(x)
        assert (qompose.compile_lowered(model)(x) - expected).norm() / expected.norm() < 0.01


@needs_native
@pytest.mark.parametrize("length", [1, native_float_attention.FEW_QUERIES])
def test_few_queries_are_ours(length: int) -> None:
    x = inputs(2, length, floats=True)[0]
    assert calls_in_float(left_in_float(in_float(), x)) == 1


@needs_native
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (native_float_attention.FEW_QUERIES + 1, {}),
        (native_float_attention.FEWEST_QUERIES - 1, {}),
        (60, {"dropout_p": 0.1}),
    ],
    ids=["not so few queries", "not so many queries", "dropout"],
)
def test_attention_that_stays_torchs(length: int, options: dict[str, Any]) -> None:
    x = inputs(2, length, floats=True)[0]
    assert calls_in_float(left_in_float(in_float(**options), x)) == 0


@needs_native
def test_heads_that_repeat_stay_torchs() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        heads = m.packed(x).unflatten(-1, (2 * HEADS, WIDTH)).transpose(1, 2)
        key = heads[:, :1]
        means = F.scaled_dot_product_attention(heads[:, :HEADS], key, key)
        return m.out(means.transpose(1, 2).flatten(2))

    assert calls_in_float(left_in_float(forward, inputs(2, 60, floats=True)[0])) == 0
