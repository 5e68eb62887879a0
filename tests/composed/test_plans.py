# SPDX-License-Identifier: Apache-2.0
"""What the real backends take of models of many kinds: their plans are on file."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
from qompose_x86_inductor import X86InductorQuantizer
from qompose_x86_inductor.onednn import exactness
from qompose_xnnpack import XNNPACKQuantizer

from tests.golden import assert_golden
from tests.zoo import by_name

PRODUCTS = {"xnnpack": XNNPACKQuantizer, "x86_inductor": X86InductorQuantizer}
MODELS = ("mobilenet_v2", "tied_language_model")


@pytest.fixture
def with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans on file are those of weights of eight bits, whichever processor this is."""
    monkeypatch.setattr(exactness, "_arithmetic", lambda: exactness._Arithmetic(exactness.FULL, ""))


@pytest.mark.usefixtures("with_vnni")
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", MODELS)
def test_golden_plans(name: str, product: str, regen: bool) -> None:
    quantizer: Any = PRODUCTS[product]()  # made now: a backend looks at the processor once
    quantizer.set_global(quantizer.backend.default_config)
    quantizer = qompose.compose("embedding", quantizer)
    prepared = qompose.prepare_pt2e(by_name(name).export(), quantizer)
    assert_golden(f"{product}-{name}", prepared, regen=regen)
