# SPDX-License-Identifier: Apache-2.0
"""A cache of what kernels make of weights, which keeps it beside the weights and never inside a module.

A module that holds a packed tensor cannot be deep-copied, saved or exported, so the form of a weight that
kernels read lives in a table keyed weakly on the weight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

_Form = TypeVar("_Form")


@dataclass(slots=True)
class _Entry:
    owner: weakref.ref[Tensor]
    state: int | Tensor
    place: tuple[int, torch.device]
    forms: dict[Hashable, Any] = field(default_factory=dict)

    def holds_for(self, tensor: Tensor) -> bool:
        """Return whether the entry belongs to this very tensor, unchanged since."""
        if self.owner() is not tensor or self.place != _place(tensor):
            return False
        if isinstance(self.state, int):
            return self.state == tensor._version
        return torch.equal(self.state, tensor)


class WeightCache:
    """Forms of weights, each made on first use, made again when its weight was written to, dropped with it.

    Writes through the weight or its views are seen, those to inference tensors too: torch counts none of
    those, so a copy of the tensor is kept and compared at each use. A write through `weight.data` leaves no
    trace in torch's version counter and is not seen.
    """

    def __init__(self) -> None:
        self._table: dict[int, _Entry] = {}
        self._lock = threading.RLock()

    def get(self, weight: Tensor, form: Hashable, build: Callable[[], _Form]) -> _Form:
        """Return a form of a weight under a name of its own: the known one, or what `build` makes now.

        Args:
            weight: a tensor of any size. The very object counts, not its values.
            build: reads nothing that changes but `weight`; what it returns does not refer to that, which
                would keep it alive.
        """
        entry = self._table.get(id(weight))
        if entry is not None and form in entry.forms and entry.holds_for(weight):
            known: _Form = entry.forms[form]
            return known
        with self._lock:
            entry = self._table.get(id(weight))
            if entry is None or not entry.holds_for(weight):
                entry = self._table[id(weight)] = self._new_entry(weight)
            if form not in entry.forms:
                entry.forms[form] = build()
            made: _Form = entry.forms[form]
            return made

    def form(self, build: Callable[[Tensor], _Form]) -> Callable[[Tensor], _Form]:
        """Return a function of a weight of any size that calls `build` once for each, as `get` does."""

        def cached(weight: Tensor) -> _Form:
            return self.get(weight, cached, lambda: build(weight))

        return cached

    def owners(self) -> frozenset[int]:
        """Return the `id` of each tensor that has a form now."""
        return frozenset(self._table)

    def _new_entry(self, tensor: Tensor) -> _Entry:
        number = id(tensor)

        def forget(reference: weakref.ref[Tensor]) -> None:
            # The number may already belong to a younger tensor with an entry of its own.
            entry = self._table.get(number)
            if entry is not None and entry.owner is reference:
                del self._table[number]

        state = tensor.clone() if tensor.is_inference() else tensor._version
        return _Entry(weakref.ref(tensor, forget), state, _place(tensor))


def _place(tensor: Tensor) -> tuple[int, torch.device]:
    return tensor.data_ptr(), tensor.device
