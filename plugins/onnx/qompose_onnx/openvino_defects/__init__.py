# SPDX-License-Identifier: Apache-2.0
"""What OpenVINO would compute wrongly without a word, in a form that it computes rightly, or refused.

`DEFECTS` lists it. `settle` and `settle_file` rewrite a model before OpenVINO reads it, and `check` looks at
what it compiled. A workaround goes with its row, its module and its tests.
"""

from __future__ import annotations

from qompose_onnx.openvino_defects.table import DEFECTS, Defect, check, settle, settle_file

__all__ = ["DEFECTS", "Defect", "check", "settle", "settle_file"]
