# SPDX-License-Identifier: Apache-2.0
"""int8 products in C++ of our own, which compiled programs hold."""
