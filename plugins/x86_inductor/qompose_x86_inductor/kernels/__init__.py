# SPDX-License-Identifier: Apache-2.0
"""The calls that replace claimed regions."""
