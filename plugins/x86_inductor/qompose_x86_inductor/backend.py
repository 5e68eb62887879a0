# SPDX-License-Identifier: Apache-2.0
"""The x86 backend and its quantizer."""

from __future__ import annotations

import platform

import torch
from qompose import (
    Backend,
    PerChannelMinMaxObserver,
    QuantizationConfig,
    QuantizationSpec,
    RuleQuantizer,
    observer_for_range,
)

from qompose_x86_inductor import isa
from qompose_x86_inductor.rules import RULES


def get_default_x86_inductor_quantization_config(
    *, reduce_range: bool = False, range: str = "histogram", balance: bool = True
) -> QuantizationConfig:
    """Return static uint8 activations per tensor and symmetric int8 weights per output channel.

    Where this processor's int8 products saturate (no VNNI), weights have seven bits: two products of
    `255 * 64` fit into the 16 bits that such a processor adds them in.

    Its name is that of the backend's configuration, followed by what was chosen otherwise.

    Args:
        reduce_range: use seven bits for activations, [0, 127].
        range: how an activation's range is estimated: "histogram", "mse", "minmax" or
            "moving_average" (`qompose.observer_for_range`).
        balance: let channels of very different size get factors of their own (`QuantizationConfig`).
    """
    low, high = isa.recommended_weight_range()
    activation = QuantizationSpec(
        dtype=torch.uint8,
        observer_or_fake_quant_ctr=observer_for_range(range),
        quant_min=0,
        quant_max=127 if reduce_range else 255,
        qscheme=torch.per_tensor_affine,
    )
    weight = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
        quant_min=low,
        quant_max=high,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )
    choices = (
        ("activations", [0, activation.quant_max], [0, 255]),
        ("range", range, "histogram"),
        ("balance", balance, True),
    )
    unusual = (f"{what} {chosen}" for what, chosen, usual in choices if chosen != usual)
    name = ", ".join(("static", *unusual))
    return QuantizationConfig(activation, None, weight, None, balance=balance, name=name)


class X86InductorBackend(Backend):
    """int8 convolution and linear on oneDNN, with fused activations and weights packed once."""

    name = "x86_inductor"
    api_version = 1
    rules = RULES

    def __init__(self) -> None:
        config = get_default_x86_inductor_quantization_config()
        self.configs = {config.name: config}
        self.quantizer_class = X86InductorQuantizer

    def availability(self) -> str | None:
        """Return why oneDNN's int8 operators cannot be used in this process."""
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"it needs an x86 processor, and this is {platform.machine()}"
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "this build of torch has no oneDNN; install one from PyPI"
        return None


class X86InductorQuantizer(RuleQuantizer):
    """Quantizes what oneDNN computes in int8. Without `set_global` or another selector, nothing."""

    def __init__(self) -> None:
        super().__init__(X86InductorBackend())
