# SPDX-License-Identifier: Apache-2.0
"""The configurations: static for each runtime that reads QDQ, dynamic, and weights alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from qompose import QuantizationConfig
from qompose.backend import kit
from qompose.errors import ConfigError

from qompose_onnx.names import ATTENTION, TENSORRT
from qompose_onnx.runtimes import sums_are_exact_here

GROUP_SIZES: Final = (16, 32, 64, 128, 256)
"""Sizes of blocks that ONNX Runtime fuses into MatMulNBits."""
NARROW: Final = (-64, 63)
"""Weights of seven bits: two products of them and 255 fit into 16 bits."""


ACTIVATIONS: Final = ("uint8", "int8", "uint16", "int16")


def get_onnx_quantization_config(
    activation: str | None = None,
    *,
    bits: int | None = None,
    symmetric_activations: bool = False,
    attention: bool = False,
    tensorrt: bool = False,
    **options: Any,
) -> QuantizationConfig:
    """Return a configuration, named after its choices. Weights are symmetric int8, per output channel.

    On x86 processors without VNNI, ONNX Runtime and OpenVINO add products of uint8 and int8 in 16 bits.
    Those sums saturate unless weights have seven bits.

    Args:
        activation: "uint8", the default, or "int8". ONNX Runtime wants int8 on Arm. On x86 processors it
            computes with uint8, into which it turns int8 that one operator reads; what several read, as in
            residual networks, it computes in float. "uint16" and "int16" are for accelerators: on CPUs ONNX
            Runtime computes in float between such integers.
        bits: of the weights, 2 to 8. None: 8, or 7 where the installed runtime's sums saturate on this
            processor. A file for processors with VNNI may have 8 wherever it is made.
        symmetric_activations: whether zero points of static activations are 0 (of uint8: 128).
        attention: queries and keys are int8, too, which OpenVINO multiplies as integers: MiniLM takes 0.96
            of the time, and loses 0.2 dB.
        tensorrt: what TensorRT reads: static int8 with zero points of 0, biases in float. Lower for the
            target "tensorrt", which checks files against TensorRT's documented rules; it has never run one.
        options: those of `qompose.backend.kit.ConfigOptions`. Dynamic activations are uint8, and groups are
            for weights alone.

    Raises:
        ConfigError: arguments exclude one another, or an argument has a value that does not exist.
    """
    kit.check_booleans(
        symmetric_activations=symmetric_activations, attention=attention, tensorrt=tensorrt
    )
    if attention:
        _check_attention(tensorrt=tensorrt, **options)
        options["options"] = (*options.get("options", ()), ATTENTION)
    if tensorrt:
        if (
            activation not in (None, "int8")
            or options.get("is_dynamic")
            or options.get("weight_only")
        ):
            raise ConfigError("tensorrt=True requires static quantization with activation='int8'")
        activation, symmetric_activations = "int8", True
        options["options"] = (*options.get("options", ()), TENSORRT)
    activation = "uint8" if activation is None else activation
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation must be {' or '.join(ACTIVATIONS)}, got {activation!r}")
    if bits is None and not tensorrt and _saturates(activation, options):
        bits = 7
    return _config(activation, symmetric_activations=symmetric_activations, bits=bits, **options)


def _check_attention(**asked: Any) -> None:
    """Refuse what attention in int8 cannot be combined with."""
    found = [
        name for name in ("tensorrt", "is_dynamic", "weight_only", "is_qat") if asked.get(name)
    ]
    if found:
        raise ConfigError(
            f"attention=True quantizes queries and keys statically after training, so it cannot be "
            f"combined with {found[0]}=True"
        )


def _config(
    activation: str = "uint8", *, symmetric_activations: bool = False, **options: Any
) -> QuantizationConfig:
    """Return a configuration that is the same on each processor, named after its activations, too."""
    if options.get("per_token"):
        raise ConfigError(
            "per_token=True is not supported: DynamicQuantizeLinear has one scale per tensor"
        )
    dtype = getattr(torch, activation)
    info = torch.iinfo(dtype)
    config = kit.ConfigFactory(
        activation=(dtype, info.min, info.max),
        group_sizes=GROUP_SIZES,
        scale_dtypes=(torch.bfloat16, torch.float32),
    )(**options)
    words = [activation] * (activation != "uint8") + ["symmetric"] * symmetric_activations
    if not words:
        return config
    if config.mode != "static":
        raise ConfigError(
            f"{' '.join(words)} activations require static quantization: without it, activations "
            "are affine uint8 or stay in float"
        )
    spec: Any = config.input_activation
    if symmetric_activations:
        spec = replace(spec, qscheme=torch.per_tensor_symmetric)
    name = f"{config.name}, {' '.join(words)} activations"
    return replace(config, input_activation=spec, output_activation=spec, name=name)


def _saturates(activation: str, options: Mapping[str, Any]) -> bool:
    """Tell whether this processor adds products of such activations and weights of eight bits wrongly."""
    bounds = {"weight_only", "weight_qmin", "weight_qmax"}
    if activation not in ("uint8", "int8") or any(options.get(name) for name in bounds):
        return False
    return not sums_are_exact_here()


def _all() -> Iterator[QuantizationConfig]:
    """Yield the default, which depends on the processor, and others, which do not."""
    yield get_onnx_quantization_config()
    yield from (_config(), _config(bits=7))
    yield from (_config("int8"), _config("int8", symmetric_activations=True))
    yield get_onnx_quantization_config(tensorrt=True)
    yield _config(options=(ATTENTION,))
    yield from (_config("uint16"), _config(is_per_channel=False))
    yield from (_config(is_dynamic=True), _config(is_dynamic=True, bits=7))
    yield _config(weight_only=True)
    yield from (_config(weight_only=True, group_size=size) for size in (32, 128))
    yield _config(weight_only=True, group_size=32, bits=8)


@functools.cache
def named_configs() -> Mapping[str, QuantizationConfig]:
    """Return the backend's named configurations; the first is the default."""
    return MappingProxyType(kit.named(*{config.name: config for config in _all()}.values()))
