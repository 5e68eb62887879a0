# SPDX-License-Identifier: Apache-2.0
"""The command `qompose`. Importing it needs no torch."""
