# SPDX-License-Identifier: Apache-2.0
"""Importing our backends changes nothing else, in one process for all: each has its own in the full run."""

from __future__ import annotations

import json

from tests.pages import PLUGINS
from tests.processes import python

IMPORT = """
import json, sys
import torch, qompose
from qompose import *
from qompose.testing.checks_behavior import changes
load = qompose.backend.load_backend
print(json.dumps({name: changes(lambda: load(name)) for name in sys.argv[1:]}))
"""


def test_one_after_another() -> None:
    assert json.loads(python("-c", IMPORT, *PLUGINS)) == {name: [] for name in PLUGINS}
