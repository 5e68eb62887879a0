# SPDX-License-Identifier: Apache-2.0
"""A cache of packed weights, which keeps them beside the plain weights and never inside a module.

A module that holds a packed tensor cannot be deep-copied, saved or exported, so the form of a weight
that kernels read lives in a table keyed weakly on the weight: it is made on first use, made again when
the weight was written to, and dropped with the weight. Writes through the weight or its views are seen;
one through ``weight.data`` leaves no trace in torch's version counter and is not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.onednn.arguments import Geometry, Product
from qompose_x86_inductor.onednn.calls import Packed, prepack_convolution, prepack_linear
from qompose_x86_inductor.onednn.convolution_workarounds import safe_form

_Form = TypeVar("_Form")


@dataclass(slots=True)
class _Entry:
    owner: weakref.ref[Tensor]
    state: int | Tensor
    address: int
    forms: dict[Hashable, Any] = field(default_factory=dict)

    def holds_for(self, tensor: Tensor) -> bool:
        """Return whether the entry belongs to this very tensor, unchanged since."""
        if self.owner() is not tensor or self.address != tensor.data_ptr():
            return False
        if isinstance(self.state, int):
            return self.state == tensor._version
        return torch.equal(self.state, tensor)


_table: dict[int, _Entry] = {}
_lock = threading.RLock()


def cached(tensor: Tensor, form: Hashable, build: Callable[[], _Form]) -> _Form:
    """Return a form of ``tensor`` under a name of its own: from the table, or what ``build`` makes now.

    ``build`` must read nothing that changes but ``tensor``.
    """
    entry = _table.get(id(tensor))
    if entry is not None and form in entry.forms and entry.holds_for(tensor):
        known: _Form = entry.forms[form]
        return known
    with _lock:
        entry = _table.get(id(tensor))
        if entry is None or not entry.holds_for(tensor):
            entry = _table[id(tensor)] = _new_entry(tensor)
        if form not in entry.forms:
            entry.forms[form] = build()
        made: _Form = entry.forms[form]
        return made


def owners() -> frozenset[int]:
    """Return the ``id`` of each tensor that has a cached form now."""
    return frozenset(_table)


def _new_entry(tensor: Tensor) -> _Entry:
    number = id(tensor)

    def forget(reference: weakref.ref[Tensor]) -> None:
        # The number may already belong to a younger tensor with an entry of its own.
        entry = _table.get(number)
        if entry is not None and entry.owner is reference:
            del _table[number]

    # Inference tensors have no version counter: only comparing the values shows a write.
    state = tensor.clone() if tensor.is_inference() else tensor._version
    return _Entry(weakref.ref(tensor, forget), state, tensor.data_ptr())


def linear(weight: Tensor) -> Packed:
    """Return the packed form of an int8 linear weight (out, in)."""
    return _packed(weight, "linear", lambda: prepack_linear(weight))


def convolution(product: Product, geometry: Geometry) -> Packed:
    """Return the packed form of an int8 weight (out, in / groups, kh, kw) for a `Product.unsigned`.

    The image's height and width decide which kernel oneDNN packs for (on 1 x 1 kernels that is a
    third of the time), not what the result may be used with; those of the first image count.
    """
    form, placement = safe_form(product, geometry)

    def build() -> Tensor:
        return prepack_convolution(form, placement, [1, *form.x.shape[1:]])

    return _packed(product.weight, (form.x_zp, placement.key()), build)


def _packed(weight: Tensor, key: Hashable, build: Callable[[], Tensor]) -> Packed:
    def pack() -> Packed:
        zeros = torch.zeros(weight.shape[0], dtype=torch.int32, device="cpu")
        return Packed(build() if exactness.admits(weight) else None, zeros)

    return cached(weight, key, pack)
