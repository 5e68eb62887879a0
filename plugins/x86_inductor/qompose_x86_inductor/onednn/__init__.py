# SPDX-License-Identifier: Apache-2.0
"""oneDNN's int8 kernels as torch offers them: how they are called, and where they are exact."""
