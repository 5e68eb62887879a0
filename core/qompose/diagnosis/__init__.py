# SPDX-License-Identifier: Apache-2.0
"""Questions to a model: can it be quantized, where does it differ, what does each operator cost."""

from qompose.diagnosis.operator_sensitivity import Sensitivity, SiteCost, sensitivity
from qompose.diagnosis.support_query import NodeSupport, can_quantize
from qompose.diagnosis.tuning_result import Assigned, Attempt, Excluded, Tuning
from qompose.diagnosis.tuning_search import tune
from qompose.diagnosis.value_comparison import compare
from qompose.reporting.report_data import Compared, Comparison

__all__ = [
    "Assigned",
    "Attempt",
    "Compared",
    "Comparison",
    "Excluded",
    "NodeSupport",
    "Sensitivity",
    "SiteCost",
    "Tuning",
    "can_quantize",
    "compare",
    "sensitivity",
    "tune",
]
