# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors are alive at once while some code runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
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
        made = [s for s in _storages(result) if s._cdata not in self._known]
        if made:
            given = {s._cdata for s in (*_storages(args), *_storages(kwargs))}
            for storage in made:
                if storage._cdata not in given:
                    self._note(storage)
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


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors in an operator's arguments or results; pytree is much slower."""
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
