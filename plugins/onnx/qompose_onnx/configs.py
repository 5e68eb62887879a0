# SPDX-License-Identifier: Apache-2.0
"""The configurations: static for each runtime that reads QDQ, dynamic, and weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.backend import kit
from qompose.errors import ConfigError

GROUP_SIZES: Final = (16, 32, 64, 128, 256)
"""Sizes of blocks that ONNX Runtime fuses into MatMulNBits."""
NARROW: Final = (-64, 63)
"""Weights of seven bits: two products of them and 255 fit into 16 bits."""


def _words(dtype: str) -> Any:
    """Return what begins the names of configurations whose activations have a type."""

    def head(options: kit.ConfigOptions, bits: int) -> str:
        words = (
            options.mode,
            dtype if options.mode == "static" else "",
            f"{bits}-bit weights" if bits != 8 else "",
            f"groups of {options.group_size}" if options.group_size else "",
            "" if options.is_per_channel or options.group_size else "per-tensor",
        )
        return " ".join(filter(None, words))

    return head


def _factory(dtype: str, low: int, high: int) -> kit.ConfigFactory:
    return kit.ConfigFactory(
        activation=(getattr(torch, dtype), low, high),
        group_sizes=GROUP_SIZES,
        head=_words(dtype if dtype != "uint8" else ""),
    )


_FACTORIES: Final[Mapping[str, kit.ConfigFactory]] = MappingProxyType(
    {"uint8": _factory("uint8", 0, 255), "int8": _factory("int8", -128, 127)}
)


def get_onnx_quantization_config(
    activation: str = "uint8", *, symmetric_activations: bool = False, **options: Any
) -> QuantizationConfig:
    """Return a configuration, named after its choices. Weights are symmetric int8, per output channel.

    On x86 processors without VNNI, ONNX Runtime's sums of two products of uint8 and int8 saturate unless
    weights have seven bits: `bits=7`.

    Args:
        activation: "uint8" or "int8". ONNX Runtime on x86 processors computes with uint8, into which it turns
            int8 where it can; ONNX Runtime on Arm wants int8.
        symmetric_activations: whether zero points of static activations are 0 (of uint8: 128).
        options: those of `qompose.backend.kit.ConfigOptions`. Dynamic activations are uint8, and groups are
            for weights alone.

    Raises:
        ConfigError: arguments exclude one another, or an argument has a value that does not exist.
    """
    if activation not in _FACTORIES:
        raise ConfigError(f"activation must be {' or '.join(_FACTORIES)}, got {activation!r}")
    kit.check_booleans(symmetric_activations=symmetric_activations)
    config = _FACTORIES[activation](**options)
    if config.mode != "static" and (activation != "uint8" or symmetric_activations):
        raise ConfigError(
            f"activation={activation!r} and symmetric_activations={symmetric_activations} are for static "
            "activations: DynamicQuantizeLinear gives affine uint8, and weight_only=True leaves floats"
        )
    if options.get("per_token"):
        raise ConfigError(
            "per_token=True: DynamicQuantizeLinear has one scale for the whole tensor"
        )
    return _symmetric(config) if symmetric_activations else config


def _symmetric(config: QuantizationConfig) -> QuantizationConfig:
    """Return a configuration whose activations have the zero point of symmetric ranges."""
    spec: Any = config.input_activation
    assert isinstance(spec, QuantizationSpec)
    spec = replace(spec, qscheme=torch.per_tensor_symmetric)
    return replace(
        config, input_activation=spec, output_activation=spec, name=f"{config.name}, symmetric"
    )


_make = get_onnx_quantization_config
CONFIGS: Final = MappingProxyType(
    kit.named(
        _make(),
        _make(bits=7),
        _make("int8"),
        _make("int8", symmetric_activations=True),
        _make(is_per_channel=False),
        _make(is_dynamic=True),
        _make(weight_only=True),
        _make(weight_only=True, group_size=32),
        _make(weight_only=True, group_size=128),
        _make(weight_only=True, group_size=32, bits=8),
    )
)
"""The backend's named configurations; the first is the default."""
