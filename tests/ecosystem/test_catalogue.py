# SPDX-License-Identifier: Apache-2.0
"""The catalogue holds what there is, and says truly why the rest cannot be a member."""

from __future__ import annotations

import importlib

import pytest
import qompose

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
