# SPDX-License-Identifier: Apache-2.0
"""How property tests run: freely on a developer's machine, the same each time under tox."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("free", deadline=None, print_blob=True)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("free")
