# SPDX-License-Identifier: Apache-2.0
"""The configurations of tables: 8, 4 or 2 bits, symmetric or affine, per row or in groups within rows."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.backend import kit
from qompose.errors import ConfigError
from qompose.observers import PerBlockMinMaxObserver, PerChannelMinMaxObserver

BITS: Final = (8, 4, 2)

LEAST_SCALE: Final = 2**-23
"""That of weights in general. Recipes of this field take 2**-12, which leaves rows within 0.03 fewer steps
than they could have: large tables are often initialized to less than that.
"""

MOST_EPS: Final = torch.finfo(torch.float32).max


def get_embedding_quantization_config(
    bits: int = 8,
    *,
    symmetric: bool = False,
    group_size: int | None = None,
    eps: float = LEAST_SCALE,
    algorithms: tuple[Any, ...] | None = None,
) -> QuantizationConfig:
    """Return a configuration for tables. Indices, and what lookups return, stay as they are.

    ====  =======================================  ==================================================
    bits  affine                                   symmetric
    ====  =======================================  ==================================================
    8     uint8 0 .. 255, float zero point         int8 -128 .. 127, zero point 0
    4     uint8 0 .. 15, float zero point          int8 -8 .. 7, zero point 0
    2     uint8 0 .. 3, float zero point           int8 -2 .. 1, zero point 0
    ====  =======================================  ==================================================

    Scales, and the least values of affine rows, are float16 numbers below 8 bits: the kernels for those
    store them so.

    Args:
        bits: of each value, 8, 4 or 2.
        symmetric: the range of a row is symmetric about 0; affine, it is that of its values.
        group_size: give so many values in a row a scale of their own; it has to divide the rows. None: one
            scale for each row.
        eps: the least scale, in units of the table. What spans less than `eps` times the number of steps is
            coarser than it could be; the report names tables with affine rows of few steps.
        algorithms: "scale_search" clips the few values of a row that would make its step coarse. None: below
            8 bits; `()`: never (`qompose.QuantizationConfig`).

    Raises:
        ConfigError: bits, group_size or eps is out of range.
    """
    _check(bits, symmetric, group_size, eps)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    observer: Any = PerChannelMinMaxObserver if group_size is None else PerBlockMinMaxObserver
    options = {} if bits == 8 else {"scale_dtype": torch.float16}
    scheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine_float_qparams
    weight = QuantizationSpec(
        dtype=torch.int8 if symmetric else torch.uint8,
        observer_or_fake_quant_ctr=observer.with_args(eps=eps, **options),
        quant_min=low if bits < 8 else None,
        quant_max=high if bits < 8 else None,
        qscheme=scheme,
        ch_axis=0,
        block_size=None if group_size is None else (group_size,),
    )
    return QuantizationConfig(
        None,
        None,
        weight,
        None,
        name=_name(bits, symmetric, group_size, eps, algorithms),
        algorithms=algorithms,
    )


def get_default_embedding_quantization_config() -> QuantizationConfig:
    """Return uint8 rows, each with a float scale and a float zero point: the field's `embedding_byte`."""
    return get_embedding_quantization_config()


def _check(bits: object, symmetric: object, group_size: object, eps: object) -> None:
    if type(bits) is not int or bits not in BITS:
        raise ConfigError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits!r}")
    kit.check_booleans(symmetric=symmetric)
    if group_size is not None and (type(group_size) is not int or group_size < 2):
        raise ConfigError(
            f"group_size must be None or an integer greater than 1, got {group_size!r}"
        )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < MOST_EPS:
        raise ConfigError(f"eps must be a positive number less than {MOST_EPS:g}, got {eps!r}")


def _name(bits: int, symmetric: bool, group_size: int | None, eps: float, algorithms: Any) -> str:
    words = ["int" if symmetric else "uint", str(bits), " rows"]
    words += [f" in groups of {group_size}"] if group_size is not None else []
    words += [f", eps {eps:g}"] if eps != LEAST_SCALE else []
    if algorithms is not None:
        words += [f", algorithms {' and '.join(map(str, algorithms)) or 'none'}"]
    return "".join(words)


CONFIGS: Final = MappingProxyType(
    kit.named(
        *(
            get_embedding_quantization_config(bits, symmetric=symmetric, group_size=group_size)
            for group_size, listed in ((None, BITS), (32, (4,)))
            for symmetric in (False, True)
            for bits in listed
        )
    )
)
"""Those that the backend lists, by name; the first is the default. Any other is accepted as well."""
