# SPDX-License-Identifier: Apache-2.0
"""The configurations: static for each runtime that reads QDQ, dynamic, and weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from qompose import QuantizationConfig
from qompose.backend import kit
from qompose.errors import ConfigError

GROUP_SIZES: Final = (16, 32, 64, 128, 256)
"""Sizes of blocks that ONNX Runtime fuses into MatMulNBits."""
NARROW: Final = (-64, 63)
"""Weights of seven bits: two products of them and 255 fit into 16 bits."""
TENSORRT: Final = "tensorrt"
"""The option of the rules for TensorRT, and the name of its target."""


def _factory(dtype: torch.dtype) -> kit.ConfigFactory:
    info = torch.iinfo(dtype)
    return kit.ConfigFactory(activation=(dtype, info.min, info.max), group_sizes=GROUP_SIZES)


_FACTORIES: Final[Mapping[str, kit.ConfigFactory]] = MappingProxyType(
    {name: _factory(getattr(torch, name)) for name in ("uint8", "int8", "uint16", "int16")}
)


def get_onnx_quantization_config(
    activation: str | None = None,
    *,
    symmetric_activations: bool = False,
    tensorrt: bool = False,
    **options: Any,
) -> QuantizationConfig:
    """Return a configuration, named after its choices. Weights are symmetric int8, per output channel.

    On x86 processors without VNNI, ONNX Runtime's sums of two products of uint8 and int8 saturate unless
    weights have seven bits: `bits=7`.

    Args:
        activation: "uint8", the default, or "int8". ONNX Runtime on x86 processors computes with uint8, into
            which it turns int8; on Arm it wants int8. "uint16" and "int16" are for accelerators: on CPUs
            ONNX Runtime computes in float between such integers.
        symmetric_activations: whether zero points of static activations are 0 (of uint8: 128).
        tensorrt: what TensorRT reads: static int8 with zero points of 0, biases in float. Lower for the
            target "tensorrt", which checks files against TensorRT's documented rules; it has never run one.
        options: those of `qompose.backend.kit.ConfigOptions`. Dynamic activations are uint8, and groups are
            for weights alone.

    Raises:
        ConfigError: arguments exclude one another, or an argument has a value that does not exist.
    """
    kit.check_booleans(symmetric_activations=symmetric_activations, tensorrt=tensorrt)
    if tensorrt:
        if activation not in (None, "int8"):
            raise ConfigError(f"tensorrt=True is for int8 activations, got {activation!r}")
        activation, symmetric_activations = "int8", True
        options["options"] = (*options.get("options", ()), TENSORRT)
    activation = "uint8" if activation is None else activation
    if activation not in _FACTORIES:
        raise ConfigError(f"activation must be {' or '.join(_FACTORIES)}, got {activation!r}")
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
    return _named(config, activation, symmetric=symmetric_activations)


def _named(config: QuantizationConfig, activation: str, *, symmetric: bool) -> QuantizationConfig:
    """Return a configuration whose name tells its activations, with symmetric ranges or not."""
    spec: Any = config.input_activation
    words = [
        *([activation] if activation != "uint8" else []),
        *(["symmetric"] if symmetric else []),
    ]
    if symmetric:
        spec = replace(spec, qscheme=torch.per_tensor_symmetric)
        config = replace(config, input_activation=spec, output_activation=spec)
    told = f"{' '.join(words)} activations" if words else ""
    return replace(config, name=", ".join(filter(None, (config.name, told))))


_make = get_onnx_quantization_config
CONFIGS: Final = MappingProxyType(
    kit.named(
        _make(),
        _make(bits=7),
        _make("int8"),
        _make("int8", symmetric_activations=True),
        _make(tensorrt=True),
        _make("uint16"),
        _make(is_per_channel=False),
        _make(is_dynamic=True),
        _make(weight_only=True),
        _make(weight_only=True, group_size=32),
        _make(weight_only=True, group_size=128),
        _make(weight_only=True, group_size=32, bits=8),
    )
)
"""The backend's named configurations; the first is the default."""
