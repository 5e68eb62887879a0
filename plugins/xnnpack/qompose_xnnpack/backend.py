# SPDX-License-Identifier: Apache-2.0
"""The XNNPACK backend, its quantizer, and the target it brings."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from qompose import (
    Backend,
    CallSignature,
    Finished,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QuantizationConfig,
    QuantizationSpec,
    RuleQuantizer,
    Target,
    observer_for_range,
)
from torch.fx import GraphModule

from qompose_xnnpack.executorch_target import lower_to_executorch
from qompose_xnnpack.rules import DELEGATE, RULES


def get_symmetric_quantization_config(
    is_per_channel: bool = False,
    *,
    act_qmin: int = -128,
    act_qmax: int = 127,
    weight_qmin: int = -127,
    weight_qmax: int = 127,
    range: str = "histogram",
    balance: bool = True,
) -> QuantizationConfig:
    """Return static int8 activations per tensor and symmetric int8 weights.

    Its name is that of the backend's configuration, followed by what differs from it.

    Args:
        is_per_channel: give every output channel of a weight its own scale.
        act_qmin, act_qmax, weight_qmin, weight_qmax: bounds of the integers.
        range: how an activation's range is estimated: "histogram", "mse", "minmax" or
            "moving_average" (`qompose.observer_for_range`).
        balance: let channels of very different size get factors of their own (`QuantizationConfig`);
            it takes effect with per-channel weights.
    """
    activation = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=observer_for_range(range),
        quant_min=act_qmin,
        quant_max=act_qmax,
        qscheme=torch.per_tensor_affine,
    )
    observer = PerChannelMinMaxObserver if is_per_channel else MinMaxObserver
    weight = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=observer.with_args(eps=2**-12),
        quant_min=weight_qmin,
        quant_max=weight_qmax,
        qscheme=torch.per_channel_symmetric if is_per_channel else torch.per_tensor_symmetric,
        ch_axis=0 if is_per_channel else None,
    )
    choices = (
        ("activations", [act_qmin, act_qmax], [-128, 127]),
        ("weights", [weight_qmin, weight_qmax], [-127, 127]),
        ("range", range, "histogram"),
        ("balance", balance, True),
    )
    unusual = (f"{what} {chosen}" for what, chosen, usual in choices if chosen != usual)
    name = ", ".join((f"static {'per-channel' if is_per_channel else 'per-tensor'}", *unusual))
    return QuantizationConfig(activation, activation, weight, None, balance=balance, name=name)


def _finish(module: GraphModule, signature: CallSignature) -> Finished:
    """Export, delegate to XNNPACK, and say of every claim what became of it."""
    program = lower_to_executorch(
        module, signature.args, dict(signature.kwargs), dynamic_shapes=signature.dynamic_shapes
    )
    delegation = program.delegation
    taken = delegation.delegated_claims & delegation.int8_claims
    left = {operator.claim: operator.name for operator in delegation.portable}
    reasons = {
        claim: f"{name} stayed with ExecuTorch's portable kernels"
        for claim, name in left.items()
        if claim is not None
    }
    return Finished(program, dict.fromkeys(taken, DELEGATE.name), reasons)


def _missing() -> str | None:
    if find_spec("executorch") is None:
        return 'the package executorch is missing: pip install "qompose-xnnpack[executorch]"'
    return None


class XNNPACKBackend(Backend):
    """XNNPACK's int8 operators, on the ExecuTorch runtime or in process."""

    name = "xnnpack"
    api_version = 1
    rules = RULES
    rewrites = ("scalar_to_tensor",)
    targets = (Target("executorch", _finish, _missing),)

    def __init__(self) -> None:
        configs = map(get_symmetric_quantization_config, (True, False))
        self.configs = {config.name: config for config in configs}
        self.quantizer_class = XNNPACKQuantizer


class XNNPACKQuantizer(RuleQuantizer):
    """Quantizes what XNNPACK computes in int8. Without `set_global` or another selector, nothing."""

    def __init__(self) -> None:
        super().__init__(XNNPACKBackend())
