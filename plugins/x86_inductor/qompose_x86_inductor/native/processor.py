# SPDX-License-Identifier: Apache-2.0
"""The instruction set that C++ of our own is compiled for in this process.

lanes.h is what knows the sets. Weights are packed for the vectors of one, and a program names the one that
it was compiled for (`code`). There is none with AMX, where oneDNN is faster than the C++ could be.

===========  =====  ===================  =========================================================
set          lanes  weights              processors
===========  =====  ===================  =========================================================
avx512_vnni  16     all of int8          Intel from Cascade Lake on, AMD from Zen 4 on
avx512       16     seven bits           Skylake-SP
avx_vnni     8      all of int8          Alder Lake and what followed for desktops
avx2         8      seven bits           Haswell, AMD up to Zen 3
===========  =====  ===================  =========================================================
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor.onednn import exactness


class Isa(NamedTuple):
    """An instruction set.

    ``lanes``: numbers of 32 bits in a vector; ``weights``: the int8 weights that it multiplies exactly.
    """

    name: str
    lanes: int
    weights: tuple[int, int]

    @property
    def multiplies_bytes(self) -> bool:
        """Return whether it multiplies all of int8 exactly."""
        return self.weights == exactness.FULL

    def admits(self, weight: Tensor) -> bool:
        """Return whether it multiplies this int8 weight exactly; reads it only where that matters."""
        return exactness.is_within(weight, self.weights)


AVX512_VNNI: Final = Isa("avx512_vnni", 16, exactness.FULL)
AVX512: Final = Isa("avx512", 16, exactness.NARROW)
AVX_VNNI: Final = Isa("avx_vnni", 8, exactness.FULL)
AVX2: Final = Isa("avx2", 8, exactness.NARROW)

_AVX512_FEATURES: Final = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")

_used: Final = ContextVar("used", default=True)


def wanted() -> bool:
    """Return whether compiled programs may use C++ of our own."""
    return _used.get()


@contextmanager
def used_if(wanted: bool) -> Iterator[None]:
    """Turn the C++ off in this thread, unless it is wanted."""
    token = _used.set(wanted and _used.get())
    try:
        yield
    finally:
        _used.reset(token)


def isa() -> Isa | None:
    """Return the set that compiled programs use; None where the C++ is not for them, or turned off."""
    return of_machine() if wanted() else None


@functools.cache
def of_machine() -> Isa | None:
    """Return the set that torch compiles for on this machine, as far as oneDNN may use it too.

    ``ONEDNN_MAX_CPU_ISA`` hides VNNI from oneDNN, and so from us: then all of a program behaves as on a
    processor without it.
    """
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, pick_vec_isa

    known, chosen = torch.cpu.get_capabilities(), pick_vec_isa()
    has_vnni = exactness.vnni_exact()
    if known.get("amx_int8", False):
        return None
    if isinstance(chosen, VecAVX512) and all(known.get(name, False) for name in _AVX512_FEATURES):
        return AVX512_VNNI if has_vnni and known.get("avx512_vnni", False) else AVX512
    if isinstance(chosen, VecAVX2):
        return AVX_VNNI if has_vnni and known.get("avx_vnni", False) else AVX2
    return None
