# SPDX-License-Identifier: Apache-2.0
"""The registration of functions as operators of torch."""

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
    """Define operators for CPUs; they exist as long as the library that is returned.

    Args:
        schemas: by name, arguments and result.
        operators: by name, the function, and its fake.
        layout: the tag that tells compilers which layouts of arguments are accepted.
    """
    library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, (real, fake) in operators.items():
        tags = (torch.Tag.pt2_compliant_tag, layout)
        library.define(name + schemas[name], tags=tags)  # type: ignore[no-untyped-call]
        library.impl(name, real, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return library
