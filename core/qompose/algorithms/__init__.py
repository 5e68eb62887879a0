# SPDX-License-Identifier: Apache-2.0
"""Algorithms that change weights and biases for accuracy, one file each."""
