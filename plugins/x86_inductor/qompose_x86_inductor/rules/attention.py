# SPDX-License-Identifier: Apache-2.0
"""The rules for attention: torch's operator, and the products and softmax that it stands for.

Queries, keys and values are quantized, scores and probabilities are the kernel's own affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any, Final

import torch
import torch.nn.functional as F
from qompose.backend import Match, OperatorPattern, Pattern, Rule, kit
from torch import Tensor
from torch.fx import Node

from qompose_x86_inductor.configs import ATTENTION
from qompose_x86_inductor.kernels.attention import KERNEL, WRITTEN_OUT
from qompose_x86_inductor.operators.attention import MOST_KEYS
from qompose_x86_inductor.rules.static import ACCEPTS

aten = torch.ops.aten
_HEADS = (2, 2, 5, 8)
_OPERANDS = ("query", "key", "value")


def fits(match: Match) -> str | None:
    """Require queries, keys and values of two to four axes, with the same batches."""
    query, key, value = (kit.shape_of(match.node(name)) for name in _OPERANDS)
    if not len(query) == len(key) == len(value) or len(query) not in (2, 3, 4):
        return "queries, keys and values must all have two, three or four dimensions"
    if query[:-3] != key[:-3] or key[:-2] != value[:-2]:
        return "the batches of queries, keys or values are broadcast"
    if type(value[-2]) is int and value[-2] > MOST_KEYS:
        return f"it has {value[-2]} keys, but integer sums support at most {MOST_KEYS}"
    return None


def _operator(match: Match) -> str | None:
    """Require of torch's operator no dropout, a known scale, and a mask of which no row is broadcast away."""
    if match.argument("output", "dropout_p") != 0.0:
        return "it uses dropout"
    query, key = (kit.shape_of(match.node(name)) for name in _OPERANDS[:2])
    scale = match.argument("output", "scale")
    if isinstance(scale, Node) or (scale is None and type(query[-1]) is not int):
        return "its scale is not a constant"
    shares = match.argument("output", "enable_gqa")
    if len(query) > 2 and query[-3] != key[-3]:
        counts = (query[-3], key[-3])
        if not shares or any(type(count) is not int for count in counts):
            return "the heads of the keys are broadcast"
    mask = match.argument("output", "attn_mask")
    return _mask(mask, (*query[:-1], key[-2]), (torch.bool, torch.float32))


def _mask(mask: object, scores: tuple[Any, ...], dtypes: Sequence[torch.dtype]) -> str | None:
    if mask is None:
        return None
    if not isinstance(mask, Node):
        return "its mask is a number"
    dtype, shape = mask.meta["val"].dtype, kit.shape_of(mask)
    if dtype not in dtypes:
        return f"its mask is {dtype}, but the kernel supports {' and '.join(map(str, dtypes))}"
    return "its mask has more dimensions than the scores" if len(shape) > len(scores) else None


def _written_out(match: Match) -> str | None:
    """Require a softmax over keys, one scale for all scores, and what is added to have their shape."""
    scores = match.node("scores")
    rank = len(kit.shape_of(scores))
    if match.argument("softmax", "dim") not in (-1, rank - 1):
        return "the softmax is not over keys"
    if match.argument("softmax", "dtype") not in (None, torch.float32):
        return "the softmax has another output dtype"
    query, key = (kit.shape_of(match.node(name)) for name in ("query", "key"))
    if query[:-2] != key[:-2]:
        return "the heads of the keys are broadcast"
    if match.node("scale") is not None:
        scale = match.argument("scale", "other")
        if not isinstance(scale, (int, float)) or scale == 0:
            return "its scale is not a constant"
    added = match.node("add")
    if added is None:
        return None
    if match.argument("add", "alpha") != 1 or kit.shape_of(added) != kit.shape_of(scores):
        return "the tensor added to the scores is scaled or broadcasts them"
    return _mask(match.node("mask"), kit.shape_of(scores), (torch.float32,))


_SDPA: Final = aten.scaled_dot_product_attention.default


def _booleans() -> Tensor:
    return torch.ones(5, 5, dtype=torch.bool).tril()


def _forms() -> Iterator[OperatorPattern]:
    operands = (_HEADS,) * 3
    yield OperatorPattern((_SDPA,), lambda query, key, value: _SDPA(query, key, value), operands)
    yield OperatorPattern(
        (_SDPA,),
        lambda query, key, value: _SDPA(query, key, value, None, 0.0, True, scale=0.5),
        operands,
    )
    yield OperatorPattern(
        (_SDPA,),
        lambda query, key, value, attn_mask: _SDPA(query, key, value, attn_mask),
        (*operands, _booleans),
    )
    yield OperatorPattern(
        (_SDPA,),
        lambda query, key, value: _SDPA(query, key, value, enable_gqa=True),
        (_HEADS, (2, 1, 5, 8), (2, 1, 5, 8)),
    )


_PRODUCTS: tuple[kit.Form, ...] = (
    (torch.matmul, aten.matmul.default),
    (torch.bmm, aten.bmm.default),
)
_SCALES: tuple[kit.Form | None, ...] = (
    None,
    (lambda scores: scores * 0.5, aten.mul.Tensor),
    (lambda scores: scores / 2.0, aten.div.Tensor),
)
_ADDITIONS: tuple[kit.Form | None, ...] = (
    None,
    (torch.add, aten.add.Tensor),
    (lambda scores, mask: torch.add(mask, scores), aten.add.Tensor),
    (Tensor.add_, aten.add_.Tensor),
)
_DROPS = kit.DROPOUT.forms


def _patterns() -> Iterator[Pattern]:
    whole = product(_PRODUCTS[:1], _SCALES, _ADDITIONS, _DROPS)
    for multiply, scale, add, drop in chain(
        whole, product(_PRODUCTS[1:], (None,), (None,), _DROPS)
    ):
        rank = 3 if multiply[1] is aten.bmm.default else 4
        query, key, value, mask = (2, 5, 8), (2, 8, 5), (2, 5, 8), lambda: torch.randn(5, 5)
        shapes: list[Any] = [(*[2] * (rank - 3), *shape) for shape in (query, key, value)]
        named = (("scores", multiply), ("scale", scale), ("add", add),
                 ("softmax", (None, aten.softmax.int)), ("drop", drop), ("output", multiply))  # fmt: skip
        yield Pattern(
            _function(multiply, scale, add, drop),
            (*shapes, *([mask] if add else [])),
            tuple((name, form[1]) for name, form in named if form is not None),
        )


def _function(
    multiply: kit.Form, scale: kit.Form | None, add: kit.Form | None, drop: kit.Form | None
) -> Any:
    def probabilities(scores: Tensor, *mask: Tensor) -> Tensor:
        scores = scores if scale is None else scale[0](scores)
        scores = scores if add is None else add[0](scores, *mask)
        weights = F.softmax(scores, -1)
        return weights if drop is None else drop[0](weights)

    if add is None:
        return lambda query, key, value: multiply[0](probabilities(multiply[0](query, key)), value)
    return lambda query, key, value, mask: multiply[0](
        probabilities(multiply[0](query, key), mask), value
    )


ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        name="attention",
        drawing="scaled_dot_product_attention",
        patterns=tuple(_forms()),
        activations=_OPERANDS,
        output=False,
        option=ATTENTION,
        accepts=ACCEPTS,
        guard=(kit.float32, fits, _operator),
        kernels={"torch": KERNEL},
    ),
    Rule(
        name="attention_written_out",
        drawing="matmul [* or / scale] [+ mask] -> softmax [-> dropout] -> matmul",
        patterns=tuple(_patterns()),
        anchor="softmax",
        activations=_OPERANDS,
        output=False,
        option=ATTENTION,
        accepts=ACCEPTS,
        guard=(kit.float32, fits, kit.not_training("drop"), _written_out),
        kernels={"torch": WRITTEN_OUT},
    ),
)
