# SPDX-License-Identifier: Apache-2.0
"""The decisions about a program, as plain data."""

from qompose.plan.plan import Plan

__all__ = [
    "Plan",
]
