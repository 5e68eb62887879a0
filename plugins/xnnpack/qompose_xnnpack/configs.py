# SPDX-License-Identifier: Apache-2.0
"""The configurations of the XNNPACK backend."""

from __future__ import annotations

import torch
from qompose import QuantizationConfig
from qompose.algorithms import AlgorithmChoice
from qompose.backend import kit
from qompose.errors import ConfigError

from qompose_xnnpack.rules.constraints import GROUP_SIZES


def get_symmetric_quantization_config(
    is_per_channel: bool = False,
    is_qat: bool = False,
    is_dynamic: bool = False,
    act_qmin: int = -128,
    act_qmax: int = 127,
    weight_qmin: int | None = None,
    weight_qmax: int | None = None,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    scale_dtype: torch.dtype | None = None,
    weight_only: bool = False,
    per_token: bool = True,
    range: str = "auto",
    weight_range: str = "minmax",
    balance: bool = True,
    algorithms: tuple[AlgorithmChoice, ...] | None = None,
    fake_quantize: str = "moving_average",
) -> QuantizationConfig:
    """Return a configuration with symmetric weights, named after its choices.

    Args:
        is_per_channel: give every output channel of a weight its own scale.
        is_qat: for `qompose.prepare_qat_pt2e`: fake-quantizers in place of observers.
        is_dynamic: quantize activations when the model runs, each token (or image) by itself, as XNNPACK
            does; outputs stay in float. XNNPACK then requires weights per channel or in groups.
        act_qmin, act_qmax: bounds of the activations' integers. The kernels support -128 to 127 only.
        weight_qmin, weight_qmax: bounds of the weights' integers: -127 and 127, with groups -8 and 7.
        group_size: give every `group_size` weights in a row a scale of their own, which is rounded to the
            bfloat16 that XNNPACK stores. For linear, with dynamic activations or weights alone.
        symmetric, scale_dtype: True and torch.bfloat16, or None for them: XNNPACK has nothing else. They are
            here for `qompose.algorithms.Checkpoint.options`.
        per_token: whether each token or image has its own scale if activations are dynamic. XNNPACK itself
            supports nothing else; in process, linears can have one for the whole tensor.
        weight_only: quantize weights alone; they are stored as integers and computed with as floats.
        range: how a static activation's range is estimated: "auto", "histogram", "mse", "percentile",
            "entropy", "minmax", "moving_average" or "torch_histogram"
            (`qompose.observers.observer_for_range`).
        weight_range: how a weight's range is estimated: "minmax", "mse" or "histogram"
            (`qompose.observers.weight_observer_for_range`). The last two clip, more with four bits than
            with eight; groups have "minmax" only.
        balance: give channels of very different size factors of their own (`QuantizationConfig`);
            it takes effect with static activations and per-channel weights, and not in training.
        algorithms: methods that reduce the error of quantization, by name, as "gptq", or as objects with
            options, as `SmoothQuant(alpha=...)` (`QuantizationConfig` lists them). If None, those are used
            that help on held-out calibration data and cost nothing at run time; `()` uses none. Not for
            training.
        fake_quantize: with `is_qat`, how scales are found: "moving_average" or "learned"
            (`qompose.training_config`).

    Raises:
        ConfigError: arguments exclude one another, or an argument has a value that does not exist.
    """
    kit.check_booleans(per_token=per_token)
    if not (per_token or is_dynamic):
        raise ConfigError("per_token=False requires is_dynamic=True; without it, omit per_token")
    _check_weights(symmetric, scale_dtype)
    return _make(
        is_per_channel=is_per_channel,
        is_qat=is_qat,
        is_dynamic=is_dynamic,
        act_qmin=act_qmin,
        act_qmax=act_qmax,
        weight_qmin=weight_qmin,
        weight_qmax=weight_qmax,
        group_size=group_size,
        symmetric=symmetric,
        scale_dtype=scale_dtype,
        weight_only=weight_only,
        per_token=per_token and is_dynamic,
        range=range,
        weight_range=weight_range,
        balance=balance,
        algorithms=algorithms,
        fake_quantize=fake_quantize,
    )


_REMEDY = (
    "Give these weights a configuration of a backend that has them, or round the float weights again, "
    "without the algorithm of a checkpoint"
)


def _check_weights(symmetric: bool | None, scale_dtype: torch.dtype | None) -> None:
    """Refuse what a checkpoint may need of a configuration and XNNPACK's kernels do not have."""
    if symmetric is False:
        raise ConfigError(
            f"symmetric=False is not supported: XNNPACK has no zero points of weights. {_REMEDY}"
        )
    if scale_dtype not in (None, torch.bfloat16):
        raise ConfigError(
            f"scale_dtype={scale_dtype} is not supported: XNNPACK stores scales of groups in "
            f"torch.bfloat16. {_REMEDY}"
        )


def _head(options: kit.ConfigOptions, bits: int) -> str:
    channels = "per-channel" if options.is_per_channel else "per-tensor"
    scales = f"groups of {options.group_size}" if options.group_size else channels
    head = " ".join(filter(None, (options.mode, f"int{bits}" if bits != 8 else "", scales)))
    lone = options.is_dynamic and not options.per_token
    return f"{head}, one scale per tensor" if lone else head


_make = kit.ConfigFactory(
    group_sizes=GROUP_SIZES, group_modes=("dynamic", "weight-only"), head=_head
)

CONFIGS = kit.named(
    get_symmetric_quantization_config(is_per_channel=True),
    get_symmetric_quantization_config(),
    get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True),
    get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True, per_token=False),
    get_symmetric_quantization_config(is_dynamic=True, group_size=32),
    get_symmetric_quantization_config(is_per_channel=True, weight_only=True),
    get_symmetric_quantization_config(weight_only=True, group_size=32),
)
"""The backend's named configurations; the first is the default."""
