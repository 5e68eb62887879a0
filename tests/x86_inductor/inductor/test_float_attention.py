# SPDX-License-Identifier: Apache-2.0
"""Attention in float that a model writes out becomes one call, which computes the same, or stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose_x86_inductor.inductor import native_float_attention
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import processor
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from tests.core.toy import Model
from tests.products import x86

pytestmark = [
    pytest.mark.usefixtures("nothing_is_kept"),
    pytest.mark.skipif(processor.of_machine() is None, reason="the C++ is not for this processor"),
    pytest.mark.filterwarnings("ignore:An operator in compiled code:UserWarning"),
]
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 50, 8
COUNT = HEADS * WIDTH
Masked = Callable[[Tensor, Tensor], Tensor]
"""Scores and booleans that hide some, to the scores of a softmax."""


def heads_of(m: Any, x: Tensor) -> list[Tensor]:
    """Queries, keys and values (batch, heads, length, width)."""
    return [layer(x).view(BATCH, -1, HEADS, WIDTH).transpose(1, 2) for layer in (m.q, m.k, m.v)]


def lowered(forward: Callable[..., Any], *given: Tensor, dynamic: bool = False) -> GraphModule:
    torch.manual_seed(0)
    module = Model(forward, **{name: nn.Linear(COUNT, COUNT) for name in ("q", "k", "v")})
    found = qompose.quantize(
        module.eval(), given, backends=x86(), calibration=[given], progress=False,
        dynamic_shapes=({1: Dim("length", max=99)},) if dynamic else None,
    )  # fmt: skip
    assert isinstance(found.model, GraphModule)
    return found.model


def hidden_keys() -> Tensor:
    """Booleans (batch, 1, length, length); every fifth query has no key left."""
    torch.manual_seed(1)
    hidden = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.4
    hidden[:, :, ::5] = True
    return hidden


def added(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores / 3 + torch.zeros(hidden.shape).masked_fill(hidden, -50.0)


def added_in_place(scores: Tensor, hidden: Tensor) -> Tensor:
    return (scores * 0.4).add_(hidden.float() * -30)


def added_to(scores: Tensor, hidden: Tensor) -> Tensor:
    return torch.where(hidden, -math.inf, 0.0) + scores


def added_twice(scores: Tensor, hidden: Tensor) -> Tensor:
    near = -torch.arange(LENGTH).float()
    return near + (scores * 0.4 + torch.where(hidden, torch.finfo(torch.float32).min, 0.0))


def filled(scores: Tensor, hidden: Tensor) -> Tensor:
    return (scores * 0.4).masked_fill(hidden, -math.inf)


def filled_a_little(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill_(hidden, -1.0)


def chosen(scores: Tensor, hidden: Tensor) -> Tensor:
    return torch.where(~hidden, scores / 2, torch.finfo(torch.float32).min)


def unmasked(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores * -0.3


@pytest.mark.parametrize(
    "masked",
    [added, added_in_place, added_to, added_twice, filled, filled_a_little, chosen, unmasked],
)
def test_masks_and_scales(masked: Masked) -> None:
    """Rows without a key, and infinite ones, are what they were: a mean of all values, or NaN."""

    def forward(m: Any, x: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = heads_of(m, x)
        weights = torch.softmax(masked(query @ key.transpose(-2, -1), hidden), -1)
        return (weights @ value).transpose(1, 2).reshape(x.shape)

    assert_one_call(forward, torch.randn(BATCH, LENGTH, COUNT), hidden_keys())


def test_what_changes_nothing_is_passed_over() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        query, key, value = heads_of(m, x)
        weights = torch.softmax(query @ key.mT, 3, dtype=torch.float32).to(x.dtype)
        return nn.functional.dropout(weights, 0.1, m.training) @ value

    assert_one_call(forward, torch.randn(BATCH, LENGTH, COUNT))


def test_three_axes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        query, key, value = (each.flatten(0, 1) for each in heads_of(m, x))
        return torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)

    assert_one_call(forward, torch.randn(BATCH, LENGTH, COUNT))


def test_keys_that_come_with_their_axes_swapped() -> None:
    def forward(m: Any, x: Tensor, key: Tensor) -> Tensor:
        query, _, value = heads_of(m, x)
        return (query @ key).softmax(-1) @ value

    given = torch.randn(BATCH, LENGTH, COUNT), torch.randn(BATCH, HEADS, WIDTH, LENGTH)
    assert_one_call(forward, *given)


def test_heads_that_share_keys_are_not_copied() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        query, *others = heads_of(m, x)
        shared = (each.split(HEADS // 2, 1)[0] for each in others)
        key, value = (
            each[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape) for each in shared
        )
        return (query @ key.mT).mul_(0.5).softmax(-1) @ value

    (call,) = assert_one_call(forward, torch.randn(BATCH, LENGTH, COUNT))
    assert [n.meta["val"].shape[1] for n in call.args[1:3]] == [HEADS // 2] * 2


def assert_one_call(forward: Callable[..., Any], *given: Tensor) -> list[Any]:
    model = lowered(forward, *given)
    result = with_prepack_in_graph(model)
    calls = [n for n in result.graph.nodes if n.target is native_float_attention.attended]
    assert len(calls) == 1
    assert not result.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
    copies = [x.clone() for x in given]
    torch.testing.assert_close(result(*given), model(*copies), rtol=0, atol=1e-5, equal_nan=True)
    return calls


def scores_are_read(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    scores = query @ key.mT
    return scores.softmax(-1) @ value, scores.amax()


def probabilities_are_read(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    weights = (query @ key.mT).softmax(-1)
    return weights @ value, weights


def bias_in_place(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    biases = x.new_ones(2, BATCH, HEADS, LENGTH, LENGTH)
    return biases[0].add_(query @ key.mT).softmax(-1) @ value + biases.mean()


def booleans_added(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    return (query @ key.mT + (x[:, None, :, :1] > 0)).softmax(-1) @ value


def three_masks(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    hidden = x[:, None, :, :1] > 0
    return (added_twice(query @ key.mT, hidden) + hidden.float()).softmax(-1) @ value


def softmax_over_queries(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    return (query @ key.mT).softmax(-2) @ value


def scaled_sum(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    return torch.add(query @ key.mT, x.new_ones(LENGTH, LENGTH), alpha=2).softmax(-1) @ value


def mask_of_more_axes(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    return (query @ key.mT + x.new_ones(3, 1, 1, 1, 1)).softmax(-1) @ value


def scale_by_channel(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    return (query @ key.mT * x[:, :1, None, :LENGTH].mean(-1, keepdim=True)).softmax(-1) @ value


def writes_between(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    value = value.contiguous()
    scores = query @ key.mT
    query.mul_(0)
    return scores.softmax(-1) @ value


def heads_of_keys_repeat(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    return (query @ key[:, :1].mT).softmax(-1) @ value


def few_queries(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    return (query[:, :, :20] @ key.mT).softmax(-1) @ value


@pytest.mark.parametrize(
    "forward",
    [
        scores_are_read, probabilities_are_read, softmax_over_queries, scaled_sum,
        mask_of_more_axes, three_masks, bias_in_place, booleans_added, scale_by_channel, writes_between,
        heads_of_keys_repeat, few_queries,
    ],
)  # fmt: skip
def test_what_stays_as_it_is(forward: Callable[..., Any]) -> None:
    model = lowered(forward, torch.randn(BATCH, LENGTH, COUNT))
    targets = [node.target for node in with_prepack_in_graph(model).graph.nodes]
    assert native_float_attention.attended not in targets
    assert torch.ops.aten.softmax.int in targets


def filled_by_length(m: Any, x: Tensor) -> Any:
    query, key, value = heads_of(m, x)
    hidden = x[:, None, None, :, 0] > 0
    return (query @ key.mT).masked_fill(hidden, -x.shape[1]).softmax(-1) @ value


def test_a_number_that_only_the_run_tells_stays() -> None:
    model = lowered(filled_by_length, torch.randn(BATCH, LENGTH, COUNT), dynamic=True)
    targets = [node.target for node in with_prepack_in_graph(model).graph.nodes]
    assert native_float_attention.attended not in targets
