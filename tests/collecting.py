# SPDX-License-Identifier: Apache-2.0
"""The size of a table of weak references, once what earlier tests left behind is gone."""

from __future__ import annotations

import gc
from collections.abc import Callable


def settled(size: Callable[[], int]) -> int:
    """Collect garbage until a size stays: what is freed at last may have held the next thing."""
    found = -1
    while found != (found := size()):
        gc.collect()
    return found
