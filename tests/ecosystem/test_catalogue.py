# SPDX-License-Identifier: Apache-2.0
"""The catalogue holds what there is, and says truly why the rest cannot be a member."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import qompose

from tests.ecosystem import models, vendors
from tests.ecosystem.catalogue import BY_NAME, CATALOGUE, NO_MEMBERS
from tests.ecosystem.warned import THEIR_WARNINGS

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CATALOGUE)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_new_one_each_time_that_is_a_member_as_it_is(name: str) -> None:
    one, other = BY_NAME[name].make(), BY_NAME[name].make()
    assert one is not other
    (member,) = qompose.compose(one).members
    assert type(one).__name__ in member.name


def test_every_family_takes_part_in_the_pairs() -> None:
    """But those with the annotations of another under another name."""
    alike = {"EthosU": "TOSA", "VGF": "TOSA", "XNNPACK(torchao)": "XNNPACK"}
    paired = {entry.family for entry in CATALOGUE if entry.pairs}
    assert {entry.family for entry in CATALOGUE} - paired == {*alike}
    assert paired >= {*alike.values()}


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


@pytest.mark.parametrize("kind", models.KINDS)
def test_models_are_the_same_in_every_process(kind: str) -> None:
    before = models.sample(kind)
    models.sample.cache_clear()
    again = models.sample(kind)
    assert again.expected.equal(before.expected)
    assert not again.held_out[0].equal(again.batches[0][0])
