# SPDX-License-Identifier: Apache-2.0
"""Attention runs in delegates, as in torch for every kind of mask, whatever is written on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qompose_xnnpack.executorch_target.attention import split_attention
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor

from tests.core.toy import Model, randn

pytest.importorskip("executorch")

aten = torch.ops.aten
attend = F.scaled_dot_product_attention
Q, K, V = randn(2, 4, 3, 8), randn(2, 4, 5, 8), randn(2, 4, 5, 6)
GROUPED = (Q, randn(2, 2, 5, 8), randn(2, 2, 5, 8))
SEEN = torch.tensor([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
ADDED = torch.where(SEEN, randn(3, 5), -torch.inf)

OF_SCORES = (
    "bmm.default",
    "_softmax.default",
    "expand_copy.default",
    "eq.Scalar",
    "mul.Scalar",
    "full_like.default",
)


def repeated(x: Tensor) -> Tensor:
    """Copy groups for their heads, as transformers does."""
    return x[:, :, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8)


Form = Callable[..., Tensor]
FORMS: dict[str, tuple[Form, tuple[Tensor, ...]]] = {
    "plain": (attend, (Q, K, V)),
    "scale": (lambda q, k, v: attend(q, k, v, scale=0.1), (Q, K, V)),
    "causal": (lambda q, k, v: attend(q, k, v, is_causal=True), (Q, K, V)),
    "bool mask": (attend, (Q, K, V, SEEN)),
    "float mask": (attend, (Q, K, V, ADDED)),
    "groups": (lambda q, k, v, m: attend(q, k, v, m, enable_gqa=True), (*GROUPED, SEEN)),
    "repeated": (lambda q, k, v, m: attend(q, repeated(k), repeated(v), m), (*GROUPED, SEEN)),
    "laid out otherwise": (
        lambda q, k, v: attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        (randn(2, 3, 4, 8), randn(2, 5, 4, 8), randn(2, 5, 4, 6)),
    ),
}  # fmt: skip


def test_every_form_runs_as_in_torch() -> None:
    """Rows that see nothing are 0; nothing but masks is left to portable kernels."""

    def every(_: Any, *given: Tensor) -> list[Tensor]:
        rest, results = list(given), []
        for form, inputs in FORMS.values():
            results.append(form(*rest[: len(inputs)]))
            rest = rest[len(inputs) :]
        return results

    given = tuple(x for _, inputs in FORMS.values() for x in inputs)
    graph = torch.export.export(Model(every), given).module()
    program = lower_to_executorch(graph, given)
    for name, wanted, actual in zip(FORMS, graph(*given), program.run(*given), strict=True):
        assert torch.allclose(wanted, actual, atol=1e-6), name
        assert "mask" not in name or not actual[:, :, 1].any()
    left = {operator.name for operator in program.delegation.portable}
    assert left.isdisjoint(f"aten.{name}" for name in OF_SCORES)


def split(model: Callable[..., Any], *given: Tensor, sizes: Any = None) -> tuple[Any, Counter[Any]]:
    """A model of a buffer `kept` behind the pass, and how often it calls each operator."""
    module = Model(lambda m, *x: model(m, *x), kept=torch.nn.Buffer(torch.ones(3, 5).bool()))
    program = torch.export.export(module, given, dynamic_shapes=sizes)
    split_attention(program.graph)
    program.graph.lint()
    made = program.module()
    return made, Counter(node.target for node in made.graph.nodes)


def test_a_mask_is_looked_at_once() -> None:
    _, calls = split(
        lambda _, *x: attend(attend(*x), *x[1:]), *GROUPED[:1], K, randn(2, 4, 5, 8), SEEN
    )
    assert calls[aten.any.dim] == 1
    assert calls[aten._softmax.default] == 2


def test_a_mask_that_is_written_between_is_looked_at_again() -> None:
    def model(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = attend(q, k, v, m.kept)
        m.kept.copy_(SEEN)
        return first + attend(q, k, v, m.kept)

    made, calls = split(model, Q, K, V)
    assert calls[aten.any.dim] == 2
    wanted = attend(Q, K, V) + attend(Q, K, V, SEEN)
    assert torch.allclose(made(Q, K, V), wanted, atol=1e-6)


def test_keys_that_are_written_after_they_were_copied_are_copied() -> None:
    def model(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = repeated(k)
        k.zero_()
        return attend(q, copies, repeated(v))

    made, _ = split(model, *(x.clone() for x in GROUPED))
    wanted = attend(Q, *(repeated(x) for x in GROUPED[1:]))
    assert torch.allclose(made(*(x.clone() for x in GROUPED)), wanted, atol=1e-6)


@pytest.mark.parametrize("kind", ["unknown size", "half", "three dimensions"])
def test_what_it_does_not_know_is_left(kind: str) -> None:
    given, sizes = (Q, K, V), None
    if kind == "unknown size":
        sizes = (({0: torch.export.Dim("batch", min=2, max=4)},) * 3,)
    elif kind == "half":
        given = tuple(x.half() for x in given)  # type: ignore[assignment]
    else:
        given = tuple(x[0] for x in given)  # type: ignore[assignment]
    _, calls = split(lambda _, *x: attend(*x), *given, sizes=sizes)
    assert calls[aten.scaled_dot_product_attention.default] == 1
