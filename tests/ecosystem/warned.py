# SPDX-License-Identifier: Apache-2.0
"""What is warned of while other packages' quantizers are used, and is no defect."""

from __future__ import annotations

THEIR_WARNINGS = (
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # torch's strict export, of torch's own
    "ignore:XNNPACKQuantizer is deprecated:UserWarning",  # torchao's copy for its own tests
    # ours: several quantizers want nothing of some models, and the tests compare what came of it
    "ignore:Nothing was quantized:qompose.QomposeWarning",
)
