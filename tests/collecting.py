# SPDX-License-Identifier: Apache-2.0
"""What a table of weak references still holds of a test's own, whatever earlier tests left in it."""

from __future__ import annotations

import gc
from collections.abc import Callable


def kept(owners: Callable[[], frozenset[int]], before: frozenset[int]) -> frozenset[int]:
    """The owners that are in a table and were not before, once garbage is collected."""
    gc.collect()
    return owners() - before
