# SPDX-License-Identifier: Apache-2.0
"""Functionals: which aten operators an exported program has where a model calls a function of torch.

Nearly always the operator has the function's name, with an underscore behind it where it works in place.
`_NAMES` has the exceptions; a function that torch writes with several operators has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qompose.errors import SelectorError

aten = torch.ops.aten

_NAMES: dict[str, tuple[str, ...]] = {
    "adaptive_max_pool1d_with_indices": ("adaptive_max_pool1d",),
    "adaptive_max_pool2d_with_indices": ("adaptive_max_pool2d",),
    "adaptive_max_pool3d_with_indices": ("adaptive_max_pool3d",),
    "affine_grid": ("affine_grid_generator",),
    "cross_entropy": ("cross_entropy_loss",),
    "dropout1d": ("feature_dropout",),
    "dropout2d": ("feature_dropout",),
    "dropout3d": ("feature_dropout",),
    "fold": ("col2im",),
    "grid_sample": ("grid_sampler",),
    "_threshold": ("threshold",),
    "unfold": ("im2col", "unfold"),
    # The names of Python's operators.
    "truediv": ("div",),
    "floordiv": ("floor_divide",),
    "mod": ("remainder",),
    "sub": ("sub", "rsub"),
    "invert": ("bitwise_not",),
    "and_": ("bitwise_and",),
    "or_": ("bitwise_or",),
    "xor": ("bitwise_xor",),
}
_NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
_UPSAMPLING = (
    *_NEAREST,
    *(f"_{name.replace('nearest', 'nearest_exact')}" for name in _NEAREST),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_NAMES |= dict.fromkeys(("interpolate", "upsample"), _UPSAMPLING)
_NAMES["upsample_nearest"] = _NEAREST
_NAMES["upsample_bilinear"] = ("upsample_bilinear2d",)

_MODULES = ("torch", "_operator", "operator")


def aten_operators(function: Callable[..., Any]) -> frozenset[torch._ops.OpOverloadPacket]:
    """Return the operators that calls of a function of torch, or of `operator`, are exported as.

    Args:
        function: `F.linear`, `torch.add`, `torch.Tensor.view`, `operator.add`, ...; a function and its
            form that works in place stand for each other.

    Raises:
        SelectorError: it is no function of torch, or torch computes it with several operators.
    """
    name = getattr(function, "__name__", "")
    if not callable(function) or not name or not _is_torchs(function):
        raise SelectorError(f"{function!r} is no function of torch")
    names = _names_of(name, in_python=_home(function) in ("_operator", "operator"))
    found = {
        getattr(aten, candidate)
        for base in names
        for candidate in (base, f"{base}_")
        if hasattr(aten, candidate)
    }
    if not found:
        raise SelectorError(
            f"no one aten operator stands for {name}: name those that it is exported as (torch.ops.aten...), "
            "or the module that calls it"
        )
    return frozenset(found)


def _names_of(name: str, *, in_python: bool) -> tuple[str, ...]:
    """Return the operators' names, for a function, a method such as `__add__`, or an in-place form."""
    if name.startswith("__") and name.endswith("__"):
        name, in_python = name.strip("_"), True
    if in_python and name not in _NAMES and not hasattr(aten, name) and name[:1] in ("i", "r"):
        name = name[1:]  # iadd, __radd__
    base = name if name in _NAMES else name.rstrip("_")
    return _NAMES.get(base, (base,))


def _home(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__objclass__", function)  # methods of tensors say their class
    return str(getattr(owner, "__module__", None) or getattr(function, "__module__", None) or "")


def _is_torchs(function: Callable[..., Any]) -> bool:
    return _home(function).partition(".")[0] in _MODULES
