# SPDX-License-Identifier: Apache-2.0
"""The registration of a kernel as a custom operator of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "qompose_xnnpack"

INT8 = (torch.int8,)
FLOAT32 = (torch.float32,)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class Implementation:
    """A kernel, with the shape of its output and the dtypes it accepts.

    ``shape``: returns the output's shape for the same arguments; None if the kernel itself runs on fake
    tensors. ``dtypes``: those that are accepted, by position; the output has the dtype of the first.
    """

    kernel: Callable[..., Tensor]
    shape: Callable[..., Sequence[int]] | None
    dtypes: Mapping[int, tuple[torch.dtype, ...]]


def register(name: str, schema: str, implementation: Implementation) -> None:
    """Define ``qompose_xnnpack::name`` for every device, with its fake.

    Calling it raises ``TypeError`` for a tensor whose dtype is not in ``implementation.dtypes``. A
    ``ValueError`` of the kernel or the shape function gets the name of the operator before it.
    """
    qualified = f"{NAMESPACE}::{name}"

    def real(*args: Any) -> Tensor:
        _check_dtypes(qualified, implementation, args)
        with _prefixing(qualified):
            return implementation.kernel(*args)

    def fake(*args: Any) -> Tensor:
        _check_dtypes(qualified, implementation, args)
        with _prefixing(qualified):
            shape = (
                implementation.shape(*args)
                if implementation.shape
                else implementation.kernel(*args).shape
            )
        return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)

    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "CompositeExplicitAutograd")(real)
    torch.library.register_fake(qualified)(fake)


@contextmanager
def _prefixing(qualified: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{qualified}: {error}") from error


def _check_dtypes(qualified: str, implementation: Implementation, args: Sequence[Any]) -> None:
    for position, dtypes in implementation.dtypes.items():
        actual = args[position].dtype
        if actual not in dtypes:
            schema = torch._C._get_schema(qualified, "")
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            argument = schema.arguments[position].name
            raise TypeError(f"{qualified} takes {wanted} for `{argument}`, got {actual}")
