# SPDX-License-Identifier: Apache-2.0
"""Algorithms that change a program for the accuracy of its integers, and what they have in common."""

from __future__ import annotations

from qompose.algorithms.bias_correction import BiasCorrection
from qompose.algorithms.channel_scaling import ChannelScaling
from qompose.algorithms.equalization import Equalization
from qompose.algorithms.gptq import GPTQ
from qompose.algorithms.interface import Algorithm
from qompose.algorithms.scale_search import ScaleSearch
from qompose.algorithms.smooth_quant import Smoothing

ALGORITHMS: tuple[Algorithm, ...] = (
    Equalization(),
    ChannelScaling(),
    Smoothing(),
    ScaleSearch(),
    GPTQ(),
    BiasCorrection(),
)
"""All that there are, in the order in which stages ask them."""
