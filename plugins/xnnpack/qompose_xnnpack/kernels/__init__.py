# SPDX-License-Identifier: Apache-2.0
"""The kernels of the rule table for the ``torch`` target: a claimed region becomes one operator call."""
