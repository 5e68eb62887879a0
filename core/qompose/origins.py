# SPDX-License-Identifier: Apache-2.0
"""Which converted model a lowered one was made of, as long as somebody keeps that one."""

from __future__ import annotations

import weakref
from typing import Any

from torch.fx import GraphModule

_origins: weakref.WeakKeyDictionary[GraphModule, weakref.ref[GraphModule]]
_origins = weakref.WeakKeyDictionary()


def note_source(lowered: Any, converted: GraphModule) -> None:
    """Remember what a graph was lowered from, and keep neither alive; programs of other runtimes are none."""
    if isinstance(lowered, GraphModule):
        _origins[lowered] = weakref.ref(converted)


def source_of(lowered: Any) -> GraphModule | None:
    """Return what a model was lowered from, in this process; None if nobody has it any more."""
    found = _origins.get(lowered) if isinstance(lowered, GraphModule) else None
    return None if found is None else found()
