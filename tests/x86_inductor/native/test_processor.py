# SPDX-License-Identifier: Apache-2.0
"""Which instruction set C++ of our own is compiled for, by processor, and what names it."""

from __future__ import annotations

import pytest
import torch
from qompose_x86_inductor.native import code, processor
from qompose_x86_inductor.native.processor import AVX2, AVX512, AVX512_VNNI, AVX_VNNI, Isa
from qompose_x86_inductor.onednn import exactness
from torch._inductor import cpu_vec_isa

WIDE = {"avx512_f": True, "avx512_bw": True, "avx512_dq": True, "avx512_vl": True}


@pytest.mark.parametrize(
    ("features", "vectors", "vnni_exact", "expected"),
    [
        ({**WIDE, "avx512_vnni": True}, cpu_vec_isa.VecAVX512, True, AVX512_VNNI),
        ({**WIDE, "avx512_vnni": True}, cpu_vec_isa.VecAVX512, False, AVX512),
        (WIDE, cpu_vec_isa.VecAVX512, False, AVX512),
        ({**WIDE, "avx512_vnni": True, "amx_int8": True}, cpu_vec_isa.VecAVX512, True, None),
        ({"avx512_f": True}, cpu_vec_isa.VecAVX512, False, None),
        ({**WIDE, "avx_vnni": True}, cpu_vec_isa.VecAVX2, True, AVX_VNNI),
        ({"avx_vnni": True}, cpu_vec_isa.VecAVX2, False, AVX2),
        ({}, cpu_vec_isa.VecAVX2, False, AVX2),
        ({}, cpu_vec_isa.InvalidVecISA, False, None),
    ],
)
def test_processors(
    features: dict[str, bool],
    vectors: type,
    vnni_exact: bool,
    expected: Isa | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where ONEDNN_MAX_CPU_ISA hides VNNI, and where torch is told to use shorter vectors."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", vectors)
    monkeypatch.setattr(exactness, "vnni_exact", lambda: vnni_exact)
    assert processor.of_machine.__wrapped__() is expected


@pytest.mark.parametrize("isa", [AVX512_VNNI, AVX512, AVX_VNNI, AVX2], ids=lambda isa: isa.name)
def test_weights_are_admitted_where_products_are_exact(isa: Isa) -> None:
    narrow, wide = (torch.tensor([[low, 0]], dtype=torch.int8) for low in (-64, -65))
    assert isa.admits(narrow)
    assert isa.admits(wide) is isa.multiplies_bytes is ("vnni" in isa.name)


def test_it_is_off_for_one_thread_and_one_call() -> None:
    with processor.used_if(False):
        assert processor.isa() is None
        with processor.used_if(True):
            assert processor.isa() is None
    assert processor.isa() is processor.of_machine()


def test_the_text_for_a_compiler_names_the_set() -> None:
    """The caches of compiled code depend on it."""
    texts = {code.with_code("int f()", "shims.h", isa) for isa in (AVX2, AVX512, None)}
    assert len(texts) == 3
    assert all(f"{text};".count(";") == 2 and "shims.h" in text for text in texts)
