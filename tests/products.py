# SPDX-License-Identifier: Apache-2.0
"""The quantizers of two plugins, with one configuration everywhere."""

from __future__ import annotations

from typing import Any

from qompose_x86_inductor import X86InductorQuantizer, get_default_x86_inductor_quantization_config
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config


def xnnpack(**options: Any) -> XNNPACKQuantizer:
    """Weights have a scale per channel, unless the options say otherwise."""
    config = get_symmetric_quantization_config(**{"is_per_channel": True, **options})
    return XNNPACKQuantizer().set_global(config)


def x86(**options: Any) -> X86InductorQuantizer:
    config = get_default_x86_inductor_quantization_config(**options)
    return X86InductorQuantizer().set_global(config)
