# SPDX-License-Identifier: Apache-2.0
"""What was decided for a program, as plain data."""

from qompose.plan.plan import Plan

__all__ = [
    "Plan",
]
