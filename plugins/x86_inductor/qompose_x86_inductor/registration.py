# SPDX-License-Identifier: Apache-2.0
"""How functions become operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_Function = Callable[..., Tensor]


def register(
    namespace: str,
    schemas: Mapping[str, str],
    operators: Mapping[str, tuple[_Function, _Function]],
    layout: torch.Tag = torch.Tag.flexible_layout,
) -> torch.library.Library:
    """Define operators for processors; they exist as long as what is returned does.

    Args:
        schemas: by name, arguments and result.
        operators: by name, the operator, and what makes its result without data.
        layout: what compilers must know of the memory of arguments.
    """
    library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, (real, fake) in operators.items():
        tags = (torch.Tag.pt2_compliant_tag, layout)
        library.define(name + schemas[name], tags=tags)  # type: ignore[no-untyped-call]
        library.impl(name, real, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return library
