# SPDX-License-Identifier: Apache-2.0
"""The form of lowered graphs that Inductor compiles well."""
