# SPDX-License-Identifier: Apache-2.0
"""The configurations of the x86 backend: static, dynamic and weight-only, down to int4 in groups."""

from __future__ import annotations

import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.algorithms import AlgorithmChoice
from qompose.backend import kit
from qompose.errors import ConfigError
from qompose.observers import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver

from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.operators.linear_float8 import DTYPES
from qompose_x86_inductor.operators.linear_packed import GROUP_SIZES

ATTENTION = "attention"
"""The option of the rules for attention (`QuantizationConfig.options`)."""

CACHE = "cache"
"""The option of the rules for caches of keys and values."""

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
    scale_dtype: torch.dtype | None = None,
    per_token: bool = False,
    isa: str | None = None,
    attention: bool = False,
    cache: bool = False,
    range: str = "auto",
    weight_range: str = "minmax",
    balance: bool = True,
    algorithms: tuple[AlgorithmChoice, ...] | None = None,
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
            bfloat16. For linear, with weights alone or with `per_token`.
        scale_dtype: torch.float32 leaves scales of groups as they are, in twice the bytes.
        symmetric: True leaves groups without zero points. Else each has one, in a byte more, so that its
            integers cover the range of its values and no more. Other weights never have any.
        per_token: give each row of a dynamic activation a scale of its own, int8 [-128, 127]. For linear.
        isa: the processor that the model will run on: "avx2" or "avx512" (without VNNI), "vnni" or
            "amx". None: this one. What it needs becomes a part of the name.
        attention: multiply queries, keys and values as integers too, with static activations. Compiled, it
            is two to three times as fast as attention in float; it costs accuracy, up to 1.5 dB in the
            networks of docs/x86.md.
        cache: keep buffers of keys and values, to which `index_copy_` or `index_put_` writes, as int8 with a
            float32 scale for each row, in any mode. Attention reads them as floats. Not for training.
        range: how a static activation's range is estimated: "auto", "histogram", "mse", "percentile",
            "entropy", "minmax", "moving_average" or "torch_histogram"
            (`qompose.observers.observer_for_range`).
        weight_range: how a weight's range is estimated: "minmax", "mse" or "histogram"
            (`qompose.observers.weight_observer_for_range`). The last two clip, more with four bits than
            with eight; groups have "minmax" only.
        balance: give channels of very different size factors of their own (`QuantizationConfig`);
            it takes effect with static activations, and not in training.
        algorithms: methods that reduce the error of quantization, by name, as "gptq", or as objects with
            options, as `SmoothQuant(alpha=...)` (`QuantizationConfig` lists them). If None, those are used
            that help on held-out calibration data and cost nothing at run time; `()` uses none. Not for
            training.
        fake_quantize: with `is_qat`, how scales are found: "moving_average" or "learned"
            (`qompose.training_config`).

    Raises:
        ConfigError: options that exclude one another, unknown ones, or weights' bounds that reach
            further to one side.
    """
    _check(reduce_range, weight_only, per_token, isa)
    kit.check_booleans(attention=attention, cache=cache)
    if group_size is not None and is_dynamic and not per_token:
        raise ConfigError(f"group_size={group_size} with is_dynamic=True requires per_token=True")
    if attention and (is_dynamic or weight_only):
        raise ConfigError(_STATIC_ATTENTION)
    if group_size is None and not weight_only:
        low, high = WEIGHT_RANGES[isa] if isa else exactness.recommended_weight_range()
        weight_qmin = low if weight_qmin is None else weight_qmin
        weight_qmax = high if weight_qmax is None else weight_qmax
    make = kit.ConfigFactory(
        activation=(torch.uint8, 0, 255),
        weight=exactness.FULL,  # others are named, so that a name means the same on every processor
        outputs=False,
        group_sizes=GROUP_SIZES,
        group_modes=("weight-only", "dynamic"),
        symmetric_groups=False,
        scale_dtypes=(torch.bfloat16, torch.float32),
        head=_head,
    )
    return make(
        is_qat=is_qat,
        is_dynamic=is_dynamic,
        weight_only=weight_only,
        act_qmax=127 if reduce_range else None,
        weight_qmin=weight_qmin,
        weight_qmax=weight_qmax,
        group_size=group_size,
        symmetric=symmetric,
        scale_dtype=scale_dtype,
        per_token=per_token,
        range=range,
        weight_range=weight_range,
        balance=balance,
        algorithms=algorithms,
        options=tuple(word for word, asked in ((ATTENTION, attention), (CACHE, cache)) if asked),
        fake_quantize=fake_quantize,
    )


_STATIC_ATTENTION = (
    "attention=True requires static activations, so it cannot be combined with is_dynamic=True or "
    "weight_only=True"
)


def _head(options: kit.ConfigOptions, bits: int) -> str:
    integers = f"int{bits}" if bits != 8 or options.weight_only else ""
    groups = f"groups of {options.group_size}" if options.group_size else ""
    words = (options.mode, integers, groups, "per token" if options.per_token else "")
    return " ".join(filter(None, words))


def get_x86_inductor_linear_dynamic_fp16_config() -> QuantizationConfig:
    """Return float16 weights, which are stored in half the bytes; the arithmetic is float32.

    Nothing is quantized to integers, in spite of the name, which is torchao's.
    """
    weight = QuantizationSpec(dtype=torch.float16, observer_or_fake_quant_ctr=PlaceholderObserver)
    return QuantizationConfig(None, None, weight, None, name="weight-only float16")


def get_x86_inductor_linear_float8_config(
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizationConfig:
    """Return float8 activations per tensor, static, and float8 weights per output channel, for linears.

    Weights take a byte each. The arithmetic is torch's, which is slower than float32 on processors without
    AMX, and less exact than int8: the configuration is for models that are to run in float8 elsewhere.

    Args:
        dtype: torch.float8_e4m3fn, or float8_e5m2 with a bit less of precision.

    Raises:
        ConfigError: another `dtype`.
    """
    if dtype not in DTYPES:
        known = " or ".join(map(str, DTYPES))
        raise ConfigError(f"dtype must be {known}, got {dtype!r}")
    activation = QuantizationSpec(dtype, MinMaxObserver, qscheme=torch.per_tensor_symmetric)
    weight = QuantizationSpec(
        dtype, PerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, ch_axis=0
    )
    name = f"static {str(dtype).removeprefix('torch.')}"
    return QuantizationConfig(
        activation, None, weight, None, name=name, balance=False, algorithms=()
    )


def _check(reduce_range: bool, weight_only: bool, per_token: bool, isa: str | None) -> None:
    kit.check_booleans(reduce_range=reduce_range, weight_only=weight_only, per_token=per_token)
    if reduce_range and (weight_only or per_token):
        other = "weight_only=True leaves activations in float"
        other = other if weight_only else "per_token=True quantizes to the full range of int8"
        raise ConfigError(f"{other}, so it cannot be combined with reduce_range=True")
    if isa not in (None, *WEIGHT_RANGES):
        known = ", ".join(WEIGHT_RANGES)
        raise ConfigError(f"isa must be None (this machine) or one of {known}, got {isa!r}")


def named() -> dict[str, QuantizationConfig]:
    """Return the backend's configurations by name; the first is the default."""
    make = get_default_x86_inductor_quantization_config
    return kit.named(
        make(),
        make(reduce_range=True),
        make(attention=True),
        make(is_dynamic=True),
        make(is_dynamic=True, per_token=True),
        make(is_dynamic=True, per_token=True, group_size=32),
        make(weight_only=True),
        make(weight_only=True, cache=True),
        make(weight_only=True, group_size=32),
        make(weight_only=True, group_size=32, symmetric=True),
        make(weight_only=True, group_size=128),
        get_x86_inductor_linear_dynamic_fp16_config(),
        get_x86_inductor_linear_float8_config(),
    )
