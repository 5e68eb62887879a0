# SPDX-License-Identifier: Apache-2.0
"""The rule table of the x86 backend, in the order in which rules are tried."""

from __future__ import annotations

from qompose_x86_inductor.rules.attention import ATTENTION_RULES
from qompose_x86_inductor.rules.cache import CACHE_RULES
from qompose_x86_inductor.rules.dynamic import DYNAMIC_RULES
from qompose_x86_inductor.rules.float8 import FLOAT8_RULES
from qompose_x86_inductor.rules.recurrent import RECURRENT_RULES
from qompose_x86_inductor.rules.static import PRODUCT_RULES, STATIC_RULES
from qompose_x86_inductor.rules.weight_only import WEIGHT_ONLY_RULES

RULES = (
    *PRODUCT_RULES,
    *ATTENTION_RULES,
    *STATIC_RULES,
    *DYNAMIC_RULES,
    *WEIGHT_ONLY_RULES,
    *FLOAT8_RULES,
    *RECURRENT_RULES,
    *CACHE_RULES,
)
