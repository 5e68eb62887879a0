# SPDX-License-Identifier: Apache-2.0
"""What the real backends take of a model that has something for each of them: their plans are on file."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
from qompose_x86_inductor import X86InductorQuantizer
from qompose_x86_inductor.onednn import exactness
from qompose_xnnpack import XNNPACKQuantizer
from syrupy.assertion import SnapshotAssertion

from tests.zoo import by_name

PRODUCTS = {"xnnpack": XNNPACKQuantizer, "x86_inductor": X86InductorQuantizer}


@pytest.fixture
def with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans on file are those of weights of eight bits, whichever processor this is."""
    monkeypatch.setattr(exactness, "_arithmetic", lambda: exactness._Arithmetic(exactness.FULL, ""))


@pytest.mark.usefixtures("with_vnni")
@pytest.mark.parametrize("product", PRODUCTS)
def test_plans_on_file(product: str, on_file: SnapshotAssertion) -> None:
    quantizer: Any = PRODUCTS[product]()  # made now: a backend looks at the processor once
    quantizer.set_global(quantizer.backend.default_config)
    quantizer = qompose.compose("embedding", quantizer)
    prepared = qompose.prepare_pt2e(by_name("tied_language_model").export(), quantizer)
    assert prepared.meta["qompose"].plan.to_dict() == on_file
