# SPDX-License-Identifier: Apache-2.0
"""The registration of functions as operators of torch, for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from qompose.backend import kit
from torch import Tensor
from torch._ops import OpOverload

_Function = Callable[..., Tensor | tuple[Tensor, ...]]


def register(
    namespace: str,
    schemas: Mapping[str, str],
    operators: Mapping[str, tuple[_Function, _Function]],
    layout: torch.Tag = torch.Tag.flexible_layout,
    *,
    devices: Sequence[str] = ("CPU",),
) -> dict[str, OpOverload]:
    """Define operators, and return them by name.

    Args:
        schemas: by name, arguments and result.
        operators: by name, the function, and its fake.
        layout: the tag that tells compilers which layouts of arguments are accepted.
        devices: the dispatch keys of torch under which they are found.
    """
    return {
        name: kit.register_operator(
            f"{namespace}::{name}",
            schemas[name],
            real,
            fake=fake,
            devices=devices,
            layout=layout,
        )
        for name, (real, fake) in operators.items()
    }
