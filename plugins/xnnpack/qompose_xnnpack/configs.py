# SPDX-License-Identifier: Apache-2.0
"""The configurations of the XNNPACK backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from qompose import QuantizationConfig, SmoothQuant, activation_spec, training_config, weight_spec
from qompose.errors import ConfigError

from qompose_xnnpack.rules.constraints import GROUP_SIZES

_INT8, _INT4 = (-127, 127), (-8, 7)


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
    weight_only: bool = False,
    per_token: bool = True,
    range: str = "auto",
    weight_range: str = "minmax",
    balance: bool = True,
    algorithms: tuple[str | SmoothQuant, ...] | None = None,
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
        algorithms: methods that reduce the error of quantization: "equalization", "smooth_quant" or
            `SmoothQuant(alpha=...)`, "gptq" and "bias_correction". If None, static configurations use the
            last three where they help and cost nothing at run time (`QuantizationConfig`); `()` uses none.
            Not for training.
        fake_quantize: with `is_qat`, how scales are found: "moving_average" or "learned"
            (`qompose.training_config`).

    Raises:
        ConfigError: arguments exclude one another, or an argument has a value that does not exist.
    """
    _check_kinds(
        {"is_per_channel": is_per_channel, "is_qat": is_qat, "is_dynamic": is_dynamic,
         "weight_only": weight_only, "per_token": per_token, "balance": balance},
        {"act_qmin": act_qmin, "act_qmax": act_qmax, "weight_qmin": weight_qmin,
         "weight_qmax": weight_qmax, "group_size": group_size},
    )  # fmt: skip
    _check(is_dynamic=is_dynamic, group_size=group_size, weight_only=weight_only)
    _check_of_use(
        {"act_qmin": act_qmin, "act_qmax": act_qmax, "range": range},
        weight_only=weight_only,
        lone_scale=not (per_token or is_dynamic),
    )
    bounds = _bounds(_INT8 if group_size is None else _INT4, weight_qmin, weight_qmax)
    weight = weight_spec(
        *bounds, per_channel=is_per_channel, group_size=group_size, range=weight_range
    )
    static = not (is_dynamic or weight_only)
    words = (
        "weight-only" if weight_only else "dynamic" if is_dynamic else "static",
        "int4" if bounds == _INT4 else "",
        f"groups of {group_size}" if group_size else "",
        "" if group_size else "per-channel" if is_per_channel else "per-tensor",
    )
    choices = (
        ("activations", [act_qmin, act_qmax], [-128, 127]),
        ("weights", [*bounds], [*(_INT4 if bounds == _INT4 else _INT8)]),
        ("range", range, "auto"),
        ("weight range", weight_range, "minmax"),
        ("balance", balance, True),
        ("algorithms", _listed(algorithms), ""),
    )
    lone_scale = is_dynamic and not per_token
    per_token = per_token and is_dynamic
    kind: dict[str, Any] = {"range": range, "is_dynamic": is_dynamic, "per_token": per_token}
    activation = None if weight_only else activation_spec(torch.int8, act_qmin, act_qmax, **kind)
    output = activation if static else None
    name = _name(words, ("one scale per tensor",) if lone_scale else (), choices)
    balance = balance and static
    config = QuantizationConfig(
        activation, output, weight, balance=balance, name=name, algorithms=algorithms
    )
    return training_config(config, fake_quantize, is_qat=is_qat)


def _bounds(usual: tuple[int, int], low: int | None, high: int | None) -> tuple[int, int]:
    return usual[0] if low is None else low, usual[1] if high is None else high


def _listed(words: object) -> str:
    if not isinstance(words, (tuple, list)):
        return "" if words is None else str(words)
    return " and ".join(map(str, words)) or "none"


def _name(
    words: tuple[str, ...], scale: tuple[str, ...], choices: tuple[tuple[str, object, object], ...]
) -> str:
    """Return the kind of a configuration in words, followed by its choices other than the defaults."""
    unusual = (f"{what} {chosen}" for what, chosen, usual in choices if chosen != usual)
    return ", ".join((" ".join(filter(None, words)), *scale, *unusual))


_ACTIVATION = {"act_qmin": -128, "act_qmax": 127, "range": "auto"}


def _check_kinds(flags: Mapping[str, object], numbers: Mapping[str, object]) -> None:
    """Reject flags other than bool and numbers other than int, which Python or torch would accept."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} must be True or False, got {flag!r}")
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ConfigError(f"{name} must be an integer, got {number!r}")


def _check_of_use(given: Mapping[str, object], *, weight_only: bool, lone_scale: bool) -> None:
    """Reject arguments that would be ignored silently."""
    unused = [f"{name}={value!r}" for name, value in given.items() if value != _ACTIVATION[name]]
    if weight_only and unused:
        raise ConfigError(
            f"weight_only=True leaves activations in float, and {', '.join(unused)} is for those that are "
            "quantized: leave one of them out"
        )
    if lone_scale:
        raise ConfigError(
            "per_token=False is for activations that are quantized when the model runs: it needs "
            "is_dynamic=True. Static ones have one scale anyway"
        )


def _check(*, is_dynamic: bool, group_size: int | None, weight_only: bool) -> None:
    if weight_only and is_dynamic:
        raise ConfigError(
            "weight_only=True leaves activations in float, and is_dynamic=True does not"
        )
    if group_size is None:
        return
    if not (is_dynamic or weight_only):
        raise ConfigError(
            f"group_size={group_size!r} needs is_dynamic=True or weight_only=True: XNNPACK has no static "
            "kernel for weights in groups"
        )
    if group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(f"group_size={group_size!r}: the sizes that XNNPACK packs are {sizes}")


_NAMED = (
    get_symmetric_quantization_config(is_per_channel=True),
    get_symmetric_quantization_config(),
    get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True),
    get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True, per_token=False),
    get_symmetric_quantization_config(is_dynamic=True, group_size=32),
    get_symmetric_quantization_config(is_per_channel=True, weight_only=True),
    get_symmetric_quantization_config(weight_only=True, group_size=32),
)
CONFIGS = {config.name: config for config in _NAMED}
"""The backend's named configurations; the first is the default."""
