# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors are alive at once while some code runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make while it is on, until each is freed.

    What an operator takes for itself while it runs is not seen, nor what was there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        outside = {_key(leaf) for leaf in given if isinstance(leaf, Tensor)} - self._known
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in outside:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        freed = weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        freed.atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
