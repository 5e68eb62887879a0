# SPDX-License-Identifier: Apache-2.0
"""A fence around code of a foreign quantizer: what it changes in the process is undone, and said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from qompose.interop.output import Output
from qompose.interop.process import (
    Environment,
    Logging,
    RandomNumbers,
    Settings,
    WarningFilters,
    Watched,
)

_KINDS: tuple[type[Watched], ...] = (
    Settings,
    Environment,
    RandomNumbers,
    WarningFilters,
    Logging,
    Output,
)

# Two fences that overlapped would each put back what the other had found.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def fenced() -> Iterator[list[str]]:
    """Run a block of foreign code; afterwards, put back what it changed in the process.

    What is covered: torch's flags, defaults and random numbers, those of `random` and numpy, the
    environment and `sys.path`, the working directory, filters of warnings, the root logger and torch's,
    and what is written to `sys.stdout` and `sys.stderr`, which is kept from appearing. Warnings and log
    records appear as they would otherwise. `interop.process` and `interop.output` say what is not covered.

    The block may raise: all is put back, and what it printed appears after all, as it may tell why.

    One thread at a time is behind a fence, others wait at theirs; fences of one thread may be nested. What
    other threads change in the process meanwhile is taken for the block's doing and put back too, but
    what they print appears.

    Yields:
        a list that is empty, and has a text for each change once the block is left: "set
        torch.backends.mkldnn.enabled to False, which was undone".
    """
    effects: list[str] = []
    with _ONE_AT_A_TIME, ExitStack() as stack:  # it calls every undo, whichever of them raises
        watched = [kind() for kind in _KINDS]
        for one in reversed(watched):
            stack.callback(lambda one=one: effects.extend(one.undo()))  # type: ignore[misc]
        try:
            yield effects
        except BaseException:
            for one in watched:
                if isinstance(one, Output):
                    one.replay()
            raise
