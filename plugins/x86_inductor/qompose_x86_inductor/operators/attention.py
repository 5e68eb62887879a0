# SPDX-License-Identifier: Apache-2.0
"""The operator ``attention``: scaled dot product attention of quantized queries, keys and values.

``query`` is (..., heads, L, E), ``key`` (..., H, S, E) and ``value`` (..., H, S, V), of two to four axes
each; the heads of a group of ``heads / H`` share keys and values. Sums of products are exact integers,
and the softmax of the scores is float32. What a row of it weights values with is
``exp(score - largest score)`` in steps of 1 / 65535, and the sum of these integers divides: small
probabilities are not lost as they would be in eight bits, and every row sums to 1.

``mask`` broadcasts to (..., heads, L, S): booleans that are true where a key counts, or float32 that is
added to the scores. A row all of whose keys are masked with -inf becomes 0 with ``safe_softmax``, as in
torch's attention, and NaN without, as in a softmax; which integer stands for NaN is not defined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor.onednn.arguments import NAMESPACE, Output

WHOLE: Final = 65535
"""The integer of a row's largest probability."""
MOST_KEYS: Final = 65536
"""For which integer sums in `native` fit into 32 bits."""
_MOST_SCORES: Final = 2**24
_EXACT_WIDTH: Final = 256  # sums of products of nine bits that float32 holds


class Quantized(NamedTuple):
    """A uint8 tensor and what its integers mean."""

    tensor: Tensor
    scale: float
    zero_point: int

    def real(self) -> Tensor:
        """Return its float32 values."""
        return (self.tensor.to(torch.float32) - self.zero_point) * self.scale


class AttentionCall(NamedTuple):
    """All arguments of ``attention``; tensors while it runs, nodes while a graph is built or rewritten."""

    query: Quantized
    key: Quantized
    value: Quantized
    mask: Tensor | None
    scale: float
    is_causal: bool
    safe_softmax: bool
    out: Output

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> AttentionCall:
        """Return the record of the operator's arguments, in the order of its schema."""
        query, key, value = (Quantized(*arguments[at : at + 3]) for at in (0, 3, 6))
        mask, scale, is_causal, safe_softmax = arguments[9:13]
        out = Output(*arguments[13:])
        return cls(query, key, value, mask, scale, is_causal, safe_softmax, out)

    def write(self) -> list[Any]:
        """Return the arguments that `read` reads."""
        return [*self.query, *self.key, *self.value, *self[3:7], *self.out[:3]]

    def checked(self) -> AttentionCall:
        """Return the same with a dtype. Raises ValueError on what the operator does not accept."""
        query, key, value = (operand.tensor for operand in self[:3])
        dtypes = [x.dtype for x in (query, key, value)]
        if dtypes != [torch.uint8] * 3:
            raise _refusal(f"expected uint8 query, key and value, got {dtypes}")
        if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3, 4):
            raise _refusal(
                f"expected the same number of dimensions (2 to 4), got {_shapes(query, key, value)}"
            )
        differ = [
            query.shape[-1] != key.shape[-1],
            key.shape[-2] != value.shape[-2],
            key.shape[:-2] != value.shape[:-2],
            query.shape[:-3] != key.shape[:-3],
            query.dim() > 2 and query.shape[-3] % key.shape[-3] != 0,
        ]  # fmt: skip
        if any(map(statically_known_true, differ)):
            raise _refusal(f"shapes do not match: {_shapes(query, key, value)}")
        if self.mask is not None and self.mask.dtype not in (torch.bool, torch.float32):
            raise _refusal(f"expected a bool or float32 mask, got {self.mask.dtype}")
        return self._replace(out=self.out.checked("attention"))


def attention(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::attention``."""
    call = AttentionCall.read(arguments).checked()
    query, key, value = (
        raised(operand.tensor).float() - operand.zero_point for operand in call[:3]
    )
    scale = call.scale * call.query.scale * call.key.scale
    means = weighted_means(query, key, value, call.mask, scale, call.is_causal, call.safe_softmax)
    result = call.out.quantize(means * call.value.scale)
    return laid_out(result.transpose(1, 2), call.query.tensor.dim())


def attention_fake(*arguments: Any) -> Tensor:
    """Return its result without values."""
    call = AttentionCall.read(arguments).checked()
    query, value = raised(call.query.tensor), raised(call.value.tensor)
    batch, heads, length, _ = query.shape
    shape = (batch, length, heads, value.shape[3])
    return laid_out(query.new_empty(shape, dtype=call.out.dtype), call.query.tensor.dim())


def attention_in_graph(*arguments: Any) -> Tensor:
    """Compute it in float32 by torch's attention, where compiled programs have no kernel on integers.

    Results differ by what the rounding of weights is, which is far below a step.
    """
    call = AttentionCall.read(arguments).checked()
    query, key, value = (operand.real() for operand in call[:3])
    shared = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    means = F.scaled_dot_product_attention(
        query, key, value, call.mask, 0.0, call.is_causal, scale=call.scale, enable_gqa=shared
    )
    if call.mask is not None and not call.safe_softmax:
        kept = call.mask if call.mask.dtype == torch.bool else call.mask != -math.inf
        means = torch.where(kept.any(-1, keepdim=True), means, math.nan)
    return call.out.quantize(means)


def weighted_means(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    safe_softmax: bool,
) -> Tensor:
    """Return the means of values, float64 (B, heads, L, V), of float32 integers of four axes each.

    ``scale`` is that of scores, per product of integers.
    """
    times = query.shape[1] // max(1, key.shape[1])
    key, value = (x.repeat_interleave(times, 1) if times > 1 else x for x in (key, value))
    kept = torch.ones(1, key.shape[2], dtype=torch.bool)
    if is_causal:
        kept = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        kept, mask = kept & mask, None
    kept = kept.expand(*kept.shape[:-2], query.shape[2], key.shape[2])
    rows = max(1, _MOST_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    blocks = [
        _means(
            query[:, :, at : at + rows], key, value, _rows(mask, at, rows), scale,
            kept[..., at : at + rows, :], safe_softmax,
        )
        for at in range(0, max(1, query.shape[2]), rows)
    ]  # fmt: skip
    return torch.cat(blocks, 2)


def _rows(mask: Tensor | None, first: int, count: int) -> Tensor | None:
    """Return rows of a mask, which may have one for all."""
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., first : first + count, :]


def _means(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    scale: float,
    kept: Tensor,
    safe_softmax: bool,
) -> Tensor:
    exact = torch.float32 if query.shape[3] <= _EXACT_WIDTH else torch.float64
    scores = (query.to(exact) @ key.to(exact).mT).float() * scale
    scores = scores if added is None else scores + added
    scores = torch.where(kept, scores, -math.inf)
    most = scores.amax(-1, keepdim=True) if key.shape[2] else scores.new_zeros(())
    e = torch.exp(scores - torch.where(most == -math.inf, 0.0, most))
    weights = torch.round(e * WHOLE).double()
    total = weights.sum(-1, keepdim=True)
    means = weights @ value.double() / total
    empty = safe_softmax or key.shape[2] == 0
    return torch.where(total == 0, 0.0, means) if empty else means


def raised(x: Tensor) -> Tensor:
    """Return a tensor of two to four axes with four."""
    return x[(None,) * (4 - x.dim())]


def laid_out(result: Tensor, axes: int) -> Tensor:
    """Return (B, L, heads, V) as (B, heads, L, V), with as many of these axes as there were."""
    moved = result.contiguous().transpose(1, 2)
    for _ in range(4 - axes):
        moved = moved.squeeze(0)
    return moved


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _refusal(why: str) -> ValueError:
    return ValueError(f"{NAMESPACE}::attention: {why}")
