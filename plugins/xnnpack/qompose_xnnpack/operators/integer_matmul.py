# SPDX-License-Identifier: Apache-2.0
"""Exact products of int8 matrices, accumulated in int32.

Nothing here depends on scales. A product is the accumulator that an ideal integer machine would hold,
whatever instructions the processor has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from qompose.backend import kit
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# |x| <= 128 and |w| <= 128 give 128 * 128 * 1024 = 2**24: up to there float32 counts in ones.
_FLOAT_BLOCK = 1024
# The same for a shifted operand: |x - zp| <= 255.
FLOAT_DEPTH = 2**24 // (255 * 128)
MAX_DEPTH = kit.MAX_DEPTH


WEIGHTS = kit.WeightCache()
"""What is computed once of each weight. It is keyed by tensor object, for which a fresh view will not do."""

row_sums = WEIGHTS.form(lambda weight: weight.flatten(1).sum(1, dtype=torch.int32))


@functools.cache
def group_sums(size: int) -> Callable[[Tensor], Tensor]:
    """Return a cached function of weights ``(N, K)``: sums of ``size`` columns, int32 ``(K / size, N)``."""

    def build(weight: Tensor) -> Tensor:
        groups = weight.reshape(weight.shape[0], -1, size)
        return groups.sum(2, dtype=torch.int32).t().contiguous()

    return WEIGHTS.form(build)


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether ``torch._int_mm`` accumulates without saturation on this processor.

    Without VNNI oneDNN adds pairs of products in int16: 64 products 127 * 127 then give 8160, not
    1,032,256. Probed once per process, with one row and with many, which take different code.
    """
    # The answer is kept, so it must not come from a tracer's tensors or those of another device.
    with _disable_current_modes():
        weight = torch.full((16, 64), 127, dtype=torch.int8, device="cpu")
        return all(
            bool((torch._int_mm(weight[:rows], weight.t()) == 64 * 127 * 127).all())
            for rows in (1, 16)
        )


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` for int8 ``x: (M, K)`` and ``weight: (N, K)``, exact int32 ``(M, N)``.

    Raises ``ValueError`` where ``K`` exceeds ``MAX_DEPTH``, as int32 could then wrap around.
    """
    check_depth(weight.shape[1])
    # At depth 1 the weight is row-major and column-major at once, and torch picks the stride that
    # oneDNN rejects; the result is then uninitialized memory (pytorch issue 195066, in 2.13).
    if x.device.type == "cpu" and weight.shape[1] > 1 and int_mm_is_exact():
        return torch._int_mm(_restride(x), _restride(weight).t())
    return _matmul_float(x, weight)


def _restride(x: Tensor) -> Tensor:
    """Return ``x`` with the strides of a fresh tensor.

    Those of axes of length 1 mean nothing and are 0 in compiled graphs, but ``_int_mm`` reads them
    (pytorch issue 195066).
    """
    return x.contiguous().view(-1).view(x.shape)


def _matmul_float(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in float32 over blocks of the depth short enough to be exact.

    Exact under every ``fp32_precision`` setting too: int8 values fit the 8 significant bits of
    bfloat16, and those settings still accumulate in float32. Autocast would round the result.
    """
    total = x.new_zeros((x.shape[0], weight.shape[0]), dtype=torch.int32)
    for start in range(0, weight.shape[1], _FLOAT_BLOCK):
        part = slice(start, start + _FLOAT_BLOCK)
        total += _float_product(x[:, part], weight[:, part]).to(torch.int32)
    return total


def _float_product(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x.float() @ weight.float().t()


def check_depth(depth: int) -> None:
    """Raise ``ValueError`` if ``depth`` products of a sum could leave the int32 range."""
    if depth > MAX_DEPTH:
        raise ValueError(
            f"a sum of {depth} int8 products may overflow int32 (at most {MAX_DEPTH} are "
            "safe); keep this operator in float"
        )


def shifted_matmul(x: Tensor, x_zp: int, weight: Tensor) -> Tensor:
    """Return ``(x - x_zp) @ weight.T`` for int8 ``x: (M, K)``, ``weight: (N, K)``, as int32 ``(M, N)``."""
    total = matmul(x, weight)
    return total if x_zp == 0 else total.sub_(row_sums(weight), alpha=x_zp)


def shifted_groups(x: Tensor, x_zp: Tensor, weight: Tensor, size: int) -> Iterator[Tensor]:
    """Yield ``(x - x_zp) @ weight.T`` over each run of ``size`` columns, as float32 ``(M, N)``.

    ``x``: int8 ``(M, K)``; ``x_zp``: int32 ``(M, 1)``, one zero point per row; ``weight``: int8
    ``(N, K)``, where ``size`` divides ``K``. The sums are exact; one beyond 2**24 is rounded once.
    """
    depth = weight.shape[1]
    parts = [slice(start, start + size) for start in range(0, depth, size)]
    # Short runs are faster in float32: nothing is left to subtract or to convert.
    if len(parts) > 1 and size <= FLOAT_DEPTH:
        shifted = x.float() - x_zp
        for part in parts:
            yield _float_product(shifted[:, part], weight[:, part])
        return
    sums = group_sums(size)(weight)
    for index, part in enumerate(parts):
        yield matmul(x[:, part], weight[:, part]).sub_(x_zp * sums[index]).float()
