# SPDX-License-Identifier: Apache-2.0
"""The rule table: which regions of a program XNNPACK quantizes, under which conditions."""
