# SPDX-License-Identifier: Apache-2.0
"""The plugin contract. Imports pluggy alone, so that listing plugins never imports torch.

A plugin is a distribution with an entry point in the group `qompose`::

    [project.entry-points.qompose]
    mybackend = "qompose_mybackend"

whose module implements the hook below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from qompose.backend import Backend

GROUP = "qompose"
"""The entry-point group, and pluggy's project name."""

API_VERSION = 1
"""Version of the interface between core and backends. A backend of another version is not loaded."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a package's function `qompose_backend`, which takes nothing and returns its `Backend`."""


@hookspec(firstresult=True)
def qompose_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend of this plugin.

    Called once per process, when the backend is first asked for by name or by one of its quantizers.
    The hook is called on the one plugin that was asked for; the order of discovery decides nothing.

    Returns:
        an object of a subclass of `qompose.Backend`, whose `name` is the entry point's name.
    """
