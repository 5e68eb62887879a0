# SPDX-License-Identifier: Apache-2.0
"""Algorithms that change a program for the accuracy of its integers, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterable

from qompose.algorithms.awq import AWQ
from qompose.algorithms.bias_correction import BiasCorrection
from qompose.algorithms.blocks import Block
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import Absorbers, Divided
from qompose.algorithms.channel_paths import absorbers_of, find_absorbers
from qompose.algorithms.checkpoint import Checkpoint
from qompose.algorithms.equalization import Equalization
from qompose.algorithms.gptq import GPTQ, SequentialGPTQ, compensated
from qompose.algorithms.interface import (
    Algorithm,
    Algorithms,
    NotChanged,
    Rewritten,
    Watched,
    load_algorithm,
)
from qompose.algorithms.packed_layouts import PackedWeight
from qompose.algorithms.product_inputs import InputMoments, Inputs
from qompose.algorithms.products import (
    Operands,
    change_products,
    check_own_integers,
    check_own_scales,
    columns_of,
    moments_read,
    noted,
    product_node,
    scales_as_stored,
    set_integers,
    set_scales,
    weight_group,
    weight_of,
)
from qompose.algorithms.scale_search import ScaleSearch
from qompose.algorithms.sign_round import SignRound
from qompose.algorithms.smooth_quant import ChannelScaling, Smoothing
from qompose.backend.discovery import algorithms
from qompose.spec.algorithm_choice import ALGORITHM_WORDS, AlgorithmChoice
from qompose.spec.claim import Claim
from qompose.spec.qdq import for_each_value

__all__ = [
    "GPTQ",
    "Absorbers",
    "Algorithm",
    "AlgorithmChoice",
    "Block",
    "Calibrated",
    "Checkpoint",
    "Divided",
    "InputMoments",
    "Inputs",
    "NotChanged",
    "Operands",
    "PackedWeight",
    "Rewritten",
    "SequentialGPTQ",
    "SignRound",
    "Watched",
    "absorbers_of",
    "algorithms",
    "change_products",
    "check_own_integers",
    "check_own_scales",
    "columns_of",
    "compensated",
    "find_absorbers",
    "for_each_value",
    "load_algorithm",
    "moments_read",
    "noted",
    "product_node",
    "scales_as_stored",
    "set_integers",
    "set_scales",
    "weight_group",
    "weight_of",
]

OWN: tuple[Algorithm, ...] = (
    Equalization(),
    ChannelScaling(),
    Smoothing(),
    AWQ(),
    ScaleSearch(),
    GPTQ(),
    SequentialGPTQ(),
    SignRound(),
    Checkpoint(),
    BiasCorrection(),
)
"""qompose's, in the order in which stages ask them; those of other packages come before bias correction."""


def algorithms_of(claims: Iterable[Claim]) -> Algorithms:
    """Return qompose's algorithms, and those of other packages that claims ask for.

    Raises:
        PluginError: one that is asked for by word cannot be loaded.
    """
    choices, others = list[AlgorithmChoice](), list[Algorithm]()
    for claim in claims:
        place = len(choices)
        for choice in reversed(claim.algorithms):  # what a configuration names first comes first
            if choice in choices:  # objects need not be hashable, and loading reads packages
                place = choices.index(choice)
            else:
                choices.insert(place, choice)
    for choice in choices:
        if isinstance(choice, str) and choice not in ALGORITHM_WORDS:
            choice = load_algorithm(choice)
        if isinstance(choice, Algorithm) and choice not in (*OWN, *others):
            others.append(choice)
    return Algorithms((*OWN[:-1], *others, OWN[-1]))
