# SPDX-License-Identifier: Apache-2.0
"""Models as files, read without running code."""
