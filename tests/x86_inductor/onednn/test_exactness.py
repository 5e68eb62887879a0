# SPDX-License-Identifier: Apache-2.0
"""Whether int8 is exact here, and that results do not depend on the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qompose_x86_inductor.onednn import exactness, packed_weights
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.processes import python

LIMIT = "ONEDNN_MAX_CPU_ISA"
HERE = Path(__file__).parent.parent
needs_vnni = pytest.mark.skipif(
    not exactness.vnni_exact(),
    reason="there is no VNNI to take away: the other tests ran without it",
)


def test_the_answer_agrees_with_itself() -> None:
    exact = exactness.vnni_exact()
    assert (exactness.reason() == "") == exact
    assert exactness.recommended_weight_range() == ((-128, 127) if exact else (-64, 63))


def test_the_recommended_range_is_admitted_and_packed() -> None:
    low, high = exactness.recommended_weight_range()
    weight = torch.tensor([[low, high, 0, 0]], dtype=torch.int8)
    assert exactness.admits(weight)
    assert packed_weights.linear(weight).weight is not None


def test_weights_beyond_the_exact_range_are_not_packed() -> None:
    weight = torch.full((1, 4), 127, dtype=torch.int8)
    assert (packed_weights.linear(weight).weight is not None) == exactness.vnni_exact()


@pytest.mark.parametrize(
    ("weights", "allowed", "expected"),
    [
        ((-64, 63), exactness.NARROW, True), ((-65, 0), exactness.NARROW, False),
        ((0, 64), exactness.NARROW, False), ((-128, 127), exactness.FULL, True), ((0, 0), None, False),
        ((), exactness.NARROW, True),
    ],
)  # fmt: skip
def test_weights_are_admitted_up_to_the_ends(
    weights: tuple[int, ...],
    allowed: tuple[int, int] | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = exactness._Arithmetic(allowed, "")
    monkeypatch.setattr(exactness, "_arithmetic", lambda: found)
    assert exactness.admits(torch.tensor(weights, dtype=torch.int8)) is expected


@pytest.mark.parametrize("weights", [exactness.FULL, exactness.NARROW])
def test_all_weights_and_all_activations_are_tried(
    weights: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bool | str, set[int]] = {True: set(), False: set(), "weights": set()}

    def agree(activation: Tensor, weight: Tensor, unsigned: bool) -> bool:
        seen[unsigned].update(activation.flatten().tolist())
        seen["weights"].update(weight.flatten().tolist())
        return True

    monkeypatch.setattr(exactness, "_kernels_agree", agree)
    assert exactness._is_exact(weights)
    assert seen[True] == {*range(256)} and seen[False] == {*range(-128, 128)}
    assert seen["weights"] == {*range(weights[0], weights[1] + 1)}


def test_probing_is_blind_to_fake_tensors_and_default_devices() -> None:
    with torch.device("meta"), FakeTensorMode():
        found = exactness._arithmetic.__wrapped__()
    assert found == exactness._arithmetic()


@needs_vnni
@pytest.mark.parametrize("limit", ["AVX2", pytest.param("AVX512_CORE", marks=pytest.mark.full)])
def test_older_instructions_are_found_to_saturate(limit: str) -> None:
    code = (
        "from qompose_x86_inductor.onednn import exactness as e; print(e.vnni_exact(), e.reason())"
    )
    assert python("-c", code, **{LIMIT: limit}).startswith("False ")


@needs_vnni
@pytest.mark.full
def test_everything_again_without_vnni() -> None:
    names = ("onednn", "operators", "rules/test_static.py")
    files = [str(HERE / name) for name in names]
    python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, **{LIMIT: "AVX2"})
