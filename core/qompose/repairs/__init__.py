# SPDX-License-Identifier: Apache-2.0
"""Repairs: rewrites that a configuration asks for by word, and that reports list one by one."""
