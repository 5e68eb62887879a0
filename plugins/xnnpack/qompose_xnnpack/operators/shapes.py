# SPDX-License-Identifier: Apache-2.0
"""The shape of an operator's output, computed from the shapes of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qompose_xnnpack.operators.integer_convolution import out_length, transposed_length


def linear_shape(x: Tensor, weight: Tensor) -> list[int]:
    """Return ``(..., O)`` for ``x: (..., K)`` and ``weight: (O, K)``.

    Raises ``ValueError`` if the last sizes differ.
    """
    if x.shape[-1] != weight.shape[1]:
        raise mismatch("their last dimensions differ", input=x, weight=weight)
    return [*x.shape[:-1], weight.shape[0]]


def scaled_linear_shape(x: Tensor, weight: Tensor, w_scale: Tensor) -> list[int]:
    """Return ``(..., O)`` for a weight with one scale, one per output channel or one per group.

    Raises ``ValueError`` if the sizes do not match.
    """
    shape = linear_shape(x, weight)
    outputs, depth = weight.shape
    groups = w_scale.shape[1] if w_scale.dim() == 2 else 1
    allowed = (outputs,) if w_scale.dim() == 2 else (outputs, 1)
    if w_scale.dim() not in (1, 2) or w_scale.shape[0] not in allowed or depth % groups:
        groups_of = f"({outputs}, groups), where the number of groups divides {depth}"
        why = f"the scales must have shape (1,), ({outputs},) or {groups_of}"
        raise mismatch(why, weight=weight, w_scale=w_scale)
    return shape


def conv_shape(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Sequence[int]:
    """Return ``(N, O, ...)`` for a convolution over any number of dimensions.

    Raises ``ValueError`` if input and weight do not match.
    """
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups:
        why = f"the weight expects {weight.shape[1] * groups} channels in {groups} groups"
        raise mismatch(why, input=x, weight=weight)
    stride, padding, dilation = per_axis(x.dim() - 2, stride, padding, dilation)
    lengths = [
        out_length(size + 2 * pad, kernel, step, gap)
        for size, kernel, step, pad, gap in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return (x.shape[0], weight.shape[0], *lengths)


def conv_transpose_shape(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Sequence[int]:
    """Return ``(N, O, ...)`` for a transposed convolution over any number of dimensions.

    Raises ``ValueError`` if input, weight and scales do not match, if an output padding is not smaller
    than the stride or the dilation of its axis, or if the output would be empty.
    """
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[0]:
        why = f"the weight expects {weight.shape[0]} channels"
        raise mismatch(why, input=x, weight=weight)
    if groups > 1 and w_scale.numel() > 1:
        why = "a grouped transposed convolution requires one scale for all channels"
        raise mismatch(why, weight=weight, w_scale=w_scale)
    geometry = (stride, padding, output_padding, dilation)
    stride, padding, extra, gaps = per_axis(x.dim() - 2, *geometry)
    if any(more >= max(step, gap) for more, step, gap in zip(extra, stride, gaps, strict=True)):
        why = f"output_padding {extra} must be less than stride {stride} or dilation {gaps}"
        raise mismatch(why, input=x, weight=weight)
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, extra, gaps, strict=True)
    lengths = [transposed_length(*axis) for axis in axes]
    if any(length < 1 for length in lengths):
        why = f"padding {padding} leaves an empty output"
        raise mismatch(why, input=x, weight=weight)
    outputs = weight.shape[1] * groups
    return (x.shape[0], outputs, *lengths)


def per_axis(rank: int, *values: Sequence[int]) -> list[list[int]]:
    """Return each of ``values`` with ``rank`` entries; a single entry stands for all axes."""
    return [list(value) * rank if len(value) == 1 else list(value) for value in values]


def mismatch(why: str, **tensors: Tensor) -> ValueError:
    """Return the error of an operator whose tensors do not match each other."""
    shapes = " and ".join(f"{role} {tuple(tensor.shape)}" for role, tensor in tensors.items())
    return ValueError(f"{shapes} do not match: {why}")
