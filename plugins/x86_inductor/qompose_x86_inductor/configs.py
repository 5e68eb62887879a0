# SPDX-License-Identifier: Apache-2.0
"""The configurations of the x86 backend: static, dynamic and weight-only, down to int4 in groups."""

from __future__ import annotations

import torch
from qompose import (
    QuantizationConfig,
    QuantizationSpec,
    SmoothQuant,
    activation_spec,
    training_config,
    weight_spec,
)
from qompose.errors import ConfigError
from qompose.observers import PlaceholderObserver

from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.operators.linear_weight_only import GROUP_SIZES

_INT4 = (-8, 7)
_FEW_BITS = {(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1): f"int{bits}" for bits in (4, 3, 2)}

WEIGHT_RANGES = {
    "avx2": exactness.NARROW,
    "avx512": exactness.NARROW,
    "vnni": exactness.FULL,
    "amx": exactness.FULL,
}
"""By instruction set of the processor that a model will run on: the weights that it multiplies exactly."""


def get_default_x86_inductor_quantization_config(
    is_qat: bool = False,
    is_dynamic: bool = False,
    reduce_range: bool = False,
    *,
    weight_only: bool = False,
    weight_qmin: int | None = None,
    weight_qmax: int | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    per_token: bool = False,
    isa: str | None = None,
    range: str = "auto",
    weight_range: str = "minmax",
    balance: bool = True,
    algorithms: tuple[str | SmoothQuant, ...] | None = None,
    fake_quantize: str = "moving_average",
) -> QuantizationConfig:
    """Return uint8 activations per tensor and int8 weights per output channel, symmetric but for groups.

    Its name lists the options that are not defaults. Where the processor's int8 products saturate (no
    VNNI), weights have seven bits: two products of `255 * 64` fit into the 16 bits of their sum.

    Args:
        is_qat: for `qompose.prepare_qat_pt2e`: fake-quantizers in place of observers.
        is_dynamic: quantize activations when the model runs; outputs stay in float.
        reduce_range: use seven bits for activations, [0, 127].
        weight_only: quantize weights alone; they are stored as integers, and the arithmetic is float.
        weight_qmin, weight_qmax: bounds of the weights' integers. By default -8 and 7 with groups, -128 and
            127 for other weights alone, else what `isa` multiplies exactly. With -4 and 3 (three bits) or -2
            and 1, kernels hold four bits with groups and eight without; a file holds three or two.
        group_size: give every `group_size` weights in a row a scale of their own, which is rounded to
            bfloat16. For linear, with weights alone.
        symmetric: True leaves groups without zero points. Else each has one, in a byte more, so that its
            integers cover the range of its values and no more. Other weights never have any.
        per_token: give each row of a dynamic activation a scale of its own, int8 [-128, 127]. For linear.
        isa: the processor that the model will run on: "avx2" or "avx512" (without VNNI), "vnni" or
            "amx". None: this exactness.
        range: how a static activation's range is estimated: "auto", "histogram", "mse", "percentile",
            "entropy", "minmax", "moving_average" or "torch_histogram"
            (`qompose.observers.observer_for_range`).
        weight_range: how a weight's range is estimated: "minmax", "mse" or "histogram"
            (`qompose.observers.weight_observer_for_range`). The last two clip, more with four bits than
            with eight; groups have "minmax" only.
        balance: give channels of very different size factors of their own (`QuantizationConfig`);
            it takes effect with static activations, and not in training.
        algorithms: methods that reduce the error of quantization: "equalization", "smooth_quant" or
            `SmoothQuant(alpha=...)`, "gptq" and "bias_correction". If None, static configurations use the
            last three where they help and cost nothing at run time (`QuantizationConfig`); `()` uses none.
            Not for training.
        fake_quantize: with `is_qat`, how scales are found: "moving_average" or "learned"
            (`qompose.training_config`).

    Raises:
        ConfigError: options that exclude one another, unknown ones, or weights' bounds that reach
            further to one side.
    """
    _check_booleans(
        is_qat=is_qat,
        is_dynamic=is_dynamic,
        reduce_range=reduce_range,
        weight_only=weight_only,
        per_token=per_token,
        balance=balance,
        **({} if symmetric is None else {"symmetric": symmetric}),
    )
    symmetric = group_size is None if symmetric is None else symmetric
    _check(is_dynamic, reduce_range, weight_only, group_size, per_token, isa)
    mode = "weight-only" if weight_only else "dynamic" if is_dynamic else "static"
    low, high = _usual_weights(weight_only, group_size, isa)
    low = low if weight_qmin is None else weight_qmin
    high = high if weight_qmax is None else weight_qmax
    few_bits = _FEW_BITS.get((low, high))
    words = (
        few_bits or ("int8" if weight_only else ""),
        f"groups of {group_size}" if group_size else "per token" if per_token else "",
    )
    here = (low, high) if few_bits else _usual_weights(weight_only, group_size, None)
    choices = (
        ("activations", [0, 127], reduce_range),
        ("weights", [low, high], (low, high) != here),
        ("weights", "symmetric", group_size is not None and symmetric),
        ("range", range, range != "auto"),
        ("weight range", weight_range, weight_range != "minmax"),
        ("balance", balance, not balance),
        ("algorithms", _listed(algorithms), algorithms is not None),
    )
    config = QuantizationConfig(
        _activation(mode, 127 if reduce_range else 255, range, per_token),
        None,
        _weight(low, high, group_size, weight_range, symmetric),
        None,
        balance=balance and mode == "static",
        name=_name(mode, words, choices),
        algorithms=algorithms,
    )
    return training_config(config, fake_quantize, is_qat=is_qat)


def _listed(words: object) -> str:
    if not isinstance(words, (tuple, list)):
        return "" if words is None else str(words)
    return " and ".join(map(str, words)) or "none"


def _name(mode: str, words: tuple[str, ...], choices: tuple[tuple[str, object, bool], ...]) -> str:
    """Return the mode with its words, followed by the choices that are unusual."""
    unusual = (f"{what} {chosen}" for what, chosen, is_unusual in choices if is_unusual)
    return ", ".join((" ".join(filter(None, (mode, *words))), *unusual))


def get_x86_inductor_linear_dynamic_fp16_config() -> QuantizationConfig:
    """Return float16 weights, which are stored in half the bytes; the arithmetic is float32.

    Nothing is quantized to integers, in spite of the name, which is torchao's.
    """
    weight = QuantizationSpec(dtype=torch.float16, observer_or_fake_quant_ctr=PlaceholderObserver)
    return QuantizationConfig(None, None, weight, None, name="weight-only float16")


def _check_booleans(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")


def _check(
    is_dynamic: bool,
    reduce_range: bool,
    weight_only: bool,
    group_size: int | None,
    per_token: bool,
    isa: str | None,
) -> None:
    if weight_only and (is_dynamic or reduce_range):
        raise ConfigError(
            "weight_only=True leaves activations in float: it excludes is_dynamic=True and reduce_range=True"
        )
    if per_token and reduce_range:
        raise ConfigError(
            "per_token=True quantizes to the whole of int8: it excludes reduce_range=True"
        )
    if group_size is not None and not weight_only:
        raise ConfigError(
            f"group_size={group_size!r} needs weight_only=True: oneDNN's int8 products have one scale per "
            "output channel"
        )
    if group_size is not None and (type(group_size) is not int or group_size not in GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(
            f"group_size must be one of {sizes}, which torch's kernel supports, got {group_size!r}"
        )
    if isa not in (None, *WEIGHT_RANGES):
        known = ", ".join(WEIGHT_RANGES)
        raise ConfigError(f"isa must be None (this machine) or one of {known}, got {isa!r}")


def _usual_weights(weight_only: bool, group_size: int | None, isa: str | None) -> tuple[int, int]:
    if group_size is not None:
        return _INT4
    if weight_only:
        return exactness.FULL  # the arithmetic is float
    return exactness.recommended_weight_range() if isa is None else WEIGHT_RANGES[isa]


def _weight(
    low: int, high: int, group_size: int | None, range: str, symmetric: bool
) -> QuantizationSpec:
    """Return a weight's specification. Bounds that reach further to one side would clip the other."""
    spec = weight_spec(low, high, group_size=group_size, range=range, symmetric=symmetric)
    if high < 1 or -low not in (high, high + 1):
        raise ConfigError(
            "weight_qmin must be -weight_qmax or one less, and weight_qmax at least 1, "
            f"got [{low}, {high}]"
        )
    return spec


def _activation(mode: str, high: int, range: str, per_token: bool) -> QuantizationSpec | None:
    dtype, low, high = (torch.int8, -128, 127) if per_token else (torch.uint8, 0, high)
    dynamic = mode == "dynamic"
    made = activation_spec(dtype, low, high, range=range, is_dynamic=dynamic, per_token=per_token)
    return None if mode == "weight-only" else made


def named() -> dict[str, QuantizationConfig]:
    """Return the backend's configurations by name; the first is the default."""
    make = get_default_x86_inductor_quantization_config
    made = (
        make(),
        make(reduce_range=True),
        make(is_dynamic=True),
        make(is_dynamic=True, per_token=True),
        make(weight_only=True),
        make(weight_only=True, group_size=32),
        make(weight_only=True, group_size=32, symmetric=True),
        make(weight_only=True, group_size=128),
        get_x86_inductor_linear_dynamic_fp16_config(),
    )
    return {config.name: config for config in made}
