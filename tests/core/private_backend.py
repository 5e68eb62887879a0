# SPDX-License-Identifier: Apache-2.0
"""A backend that reaches into qompose."""

from __future__ import annotations

import qompose.program.graph  # noqa: F401 - this is what is wrong with it

from tests.core.sound_backend import SoundBackend


class PrivateBackend(SoundBackend):
    """Sound, but for its imports."""
