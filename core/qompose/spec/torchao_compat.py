# SPDX-License-Identifier: Apache-2.0
"""qompose's classes as virtual subclasses of torchao's, so that its isinstance checks accept them.

They ask `isinstance` of classes of their own. These are abstract base classes, so qompose's are registered
as virtual subclasses: the answer changes for objects of qompose and for nothing else. It is done when such
an object is made, and only where the other package was imported already: qompose imports none of it.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable
from typing import TypeVar

Class = TypeVar("Class", bound=type)
_PT2E = "torchao.quantization.pt2e"
QUANTIZERS, OBSERVERS = f"{_PT2E}.quantizer.quantizer", f"{_PT2E}.observer"
"""The modules of the other package that define quantizers with their vocabulary, and observers."""
_unregistered: dict[tuple[str, str], type] = {}
"""qompose's classes that are not registered yet, by module and name of the class that each goes with."""


def virtual_subclass_of(module: str, name: str) -> Callable[[Class], Class]:
    """Return a class decorator: objects of the class count as ones of the class `name` of another package.

    Args:
        module: the module that defines the other class. It is never imported from here.
    """

    def note(cls: Class) -> Class:
        _unregistered[module, name] = cls
        return cls

    return note


def register_virtual_subclasses() -> None:
    """Register qompose's classes with those of other packages that were imported since the last call."""
    for (module, name), cls in list(_unregistered.items()):
        other = getattr(sys.modules.get(module), name, None)  # none while it is being imported
        if isinstance(other, ABCMeta):
            other.register(cls)
            _unregistered.pop((module, name), None)
