# SPDX-License-Identifier: Apache-2.0
"""The third stage: statistics become scales, observers become quantize and dequantize."""
