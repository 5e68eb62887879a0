# SPDX-License-Identifier: Apache-2.0
"""What happened to every operator, as data, as text and as an HTML page."""

from qompose.reporting.build_report import assert_lowered, assert_quantized, report
from qompose.reporting.report_data import Report, Row

__all__ = [
    "Report",
    "Row",
    "assert_lowered",
    "assert_quantized",
    "report",
]
