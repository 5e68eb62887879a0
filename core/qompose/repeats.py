# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor is another view of the one seen last, whose values need no second look."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class LastSeen:
    """Remembers which values of which storage were seen last, and keeps none of them alive.

    The address alone would not do: the next tensor may stand where this one was. While there is a weak
    reference to a storage, no other storage has its identity. Copies remember nothing.
    """

    def __init__(self) -> None:
        self._storage: Any = None
        self._part: tuple[int, ...] | None = None

    def again(self, x: Tensor) -> bool:
        """Tell whether `x` holds just the values that were seen last, in whatever order, and remember it."""
        part = _part_of(x)
        storage = None if part is None else _weakly(x)
        last, self._storage = self._storage, storage
        before, self._part = self._part, part
        if last is None or storage is None:
            return False
        return bool(last.cdata == storage.cdata and not last.expired() and before == part)

    def __deepcopy__(self, memo: dict[int, Any]) -> LastSeen:
        return LastSeen()

    def __reduce__(self) -> tuple[type[LastSeen], tuple[()]]:
        return LastSeen, ()


def _weakly(x: Tensor) -> Any:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def _part_of(x: Tensor) -> tuple[int, ...] | None:
    """Return which part of its storage a tensor covers, and the version; None where it leaves gaps."""
    if x.numel() == 0 or type(x) is not Tensor:
        return None
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    repeated = any(step == 0 and size > 1 for size, step in zip(x.shape, x.stride(), strict=True))
    if span != x.numel() or repeated:
        return None
    return int(x.storage_offset()), x.numel(), x._version
