# SPDX-License-Identifier: Apache-2.0
"""The catalogue holds what there is, and says truly why the rest cannot be a member."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import qompose

from tests.ecosystem import vendors
from tests.ecosystem.catalogue import BY_NAME, NO_MEMBERS
from tests.ecosystem.warned import THEIR_WARNINGS

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_new_one_each_time_that_is_a_member_as_it_is(name: str) -> None:
    one, other = BY_NAME[name].make(), BY_NAME[name].make()
    assert one is not other
    (member,) = qompose.compose(one).members
    assert type(one).__name__ in member.name


@pytest.mark.parametrize("path", NO_MEMBERS)
@pytest.mark.filterwarnings("ignore")  # the packages' own, while they are imported
def test_what_is_no_member_is_none(path: str) -> None:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return
    assert not hasattr(found, "annotate")


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("executorch.backends.mediatek.quantizer", vendors.MEDIATEK[0]),
        ("executorch.backends.nxp.quantizer.neutron_quantizer", "eIQ Neutron SDK not found"),
    ],
)
def test_what_has_a_stand_in_does_not_import_without(module: str, missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {module}"], text=True, capture_output=True
    )
    assert done.returncode
    assert missing in done.stderr.splitlines()[-1]
