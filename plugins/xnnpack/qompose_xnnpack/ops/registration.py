# SPDX-License-Identifier: Apache-2.0
"""How a kernel becomes a custom operator of torch: its schema, its checks, its shape without data."""

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
class Operator:
    """A kernel and what is known of it before it runs.

    ``shape``: of the output, from the same arguments; None where running the kernel on fake tensors
    tells. ``takes``: the dtypes of arguments by position; the output has the dtype of the first.
    """

    kernel: Callable[..., Tensor]
    shape: Callable[..., Sequence[int]] | None
    takes: Mapping[int, tuple[torch.dtype, ...]]


def register(name: str, schema: str, operator: Operator) -> None:
    """Define ``qompose_xnnpack::name`` for every device, with its fake.

    Calling it raises ``TypeError`` for a tensor of another dtype than ``operator.takes`` says, and
    any ``ValueError`` of the kernel or the shape function with the name of the operator before it.
    """
    qualified = f"{NAMESPACE}::{name}"

    def real(*args: Any) -> Tensor:
        _check_dtypes(qualified, operator, args)
        with _naming(qualified):
            return operator.kernel(*args)

    def fake(*args: Any) -> Tensor:
        _check_dtypes(qualified, operator, args)
        with _naming(qualified):
            shape = operator.shape(*args) if operator.shape else operator.kernel(*args).shape
        return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)

    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "CompositeExplicitAutograd")(real)
    torch.library.register_fake(qualified)(fake)


@contextmanager
def _naming(qualified: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{qualified}: {error}") from error


def _check_dtypes(qualified: str, operator: Operator, args: Sequence[Any]) -> None:
    for position, dtypes in operator.takes.items():
        actual = args[position].dtype
        if actual not in dtypes:
            schema = torch._C._get_schema(qualified, "")
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            argument = schema.arguments[position].name
            raise TypeError(f"{qualified} takes {wanted} for `{argument}`, not {actual}")
