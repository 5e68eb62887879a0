# SPDX-License-Identifier: Apache-2.0
"""The first stage: an exported program becomes one with observers."""
