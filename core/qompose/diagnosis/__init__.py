# SPDX-License-Identifier: Apache-2.0
"""Diagnosis: where two forms of a program differ, which operator costs most, and what to leave in float."""
