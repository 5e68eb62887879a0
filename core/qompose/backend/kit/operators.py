# SPDX-License-Identifier: Apache-2.0
"""The registration of a function as an operator of torch, with its fake and checks of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qompose.errors import ConfigError

_KEPT: list[Any] = []
"""Libraries: an operator exists as long as its own."""


def register_operator(
    name: str,
    schema: str,
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    *,
    fake: Callable[..., Tensor | tuple[Tensor, ...]] | None = None,
    shape: Callable[..., Sequence[Any]] | None = None,
    dtypes: Mapping[str, Sequence[torch.dtype]] | None = None,
    devices: Sequence[str] = (),
    layout: torch.Tag | None = None,
) -> torch._ops.OpOverload:
    """Define an operator of torch, and return it for `Region.call`.

    A ValueError of the function or of its fake gets the name of the operator before it.

    Args:
        name: `namespace::operator`.
        schema: arguments and result, `(Tensor x, float scale) -> Tensor`.
        function: takes the arguments in the order of the schema, and writes to none of them.
        fake: returns the result without values, for the same arguments.
        shape: in its place, returns the shape of the result, whose dtype and device are those of the first
            argument. Without both, the function itself runs on fake tensors.
        dtypes: by the name of an argument, those that it may have.
        devices: dispatch keys of torch, "CPU"; none: every device.
        layout: the tag that tells compilers which strides of arguments are accepted.

    Raises:
        ConfigError: `dtypes` names an unknown argument.
        TypeError: when the operator is called, for a tensor whose dtype is not in `dtypes`.
    """
    namespace, _, short = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    tags = (torch.Tag.pt2_compliant_tag, *([layout] if layout is not None else []))
    library.define(short + schema, tags=tags)  # type: ignore[no-untyped-call]
    check = _checked(name, dtypes or {})

    def real(*args: Any) -> Tensor | tuple[Tensor, ...]:
        check(args)
        try:
            return function(*args)
        except ValueError as error:
            raise _named(name, error) from error

    def without_values(*args: Any) -> Tensor | tuple[Tensor, ...]:
        check(args)
        try:
            if fake is not None:
                return fake(*args)
            if shape is None:
                return function(*args)
            found = shape(*args)
        except ValueError as error:
            raise _named(name, error) from error
        return torch.empty(found, dtype=args[0].dtype, device=args[0].device)

    for key in devices or ("CompositeExplicitAutograd",):
        library.impl(short, real, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, without_values, lib=library)
    _KEPT.append(library)
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), short).default
    return operator


def _checked(
    name: str, dtypes: Mapping[str, Sequence[torch.dtype]]
) -> Callable[[Sequence[Any]], None]:
    """Return a function that raises TypeError on arguments of other dtypes."""
    arguments = [a.name for a in torch._C._get_schema(name, "").arguments]
    unknown = sorted(set(dtypes) - set(arguments))
    if unknown:
        raise ConfigError(f"{name} has no argument {', '.join(unknown)}. Arguments: {arguments}")
    places = [(arguments.index(one), one, tuple(allowed)) for one, allowed in dtypes.items()]

    def check(args: Sequence[Any]) -> None:
        for place, one, allowed in places:
            if args[place].dtype not in allowed:
                wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
                raise TypeError(f"{name}: `{one}` must be {wanted}, got {args[place].dtype}")

    return check


def _named(name: str, error: ValueError) -> ValueError:
    """Return an error with the name of the operator before it, unless it names one of the namespace."""
    namespace = name.partition("::")[0]
    return error if str(error).startswith(f"{namespace}::") else ValueError(f"{name}: {error}")
