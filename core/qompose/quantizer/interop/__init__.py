# SPDX-License-Identifier: Apache-2.0
"""What concerns torchao and quantizers written for it."""
