# SPDX-License-Identifier: Apache-2.0
"""Quantizers: rule-based, annotating, composed and foreign ones, and which of their claims stand."""

from qompose.quantizer.base import Quantizer
from qompose.quantizer.composition import (
    ComposableQuantizer,
    compose,
    quantizer_from_dict,
    quantizer_from_json,
    quantizer_of,
)
from qompose.quantizer.restriction import restrict
from qompose.quantizer.rule_quantizer import RuleQuantizer

__all__ = [
    "ComposableQuantizer",
    "Quantizer",
    "RuleQuantizer",
    "compose",
    "quantizer_from_dict",
    "quantizer_from_json",
    "quantizer_of",
    "restrict",
]
