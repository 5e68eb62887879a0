# SPDX-License-Identifier: Apache-2.0
"""Start ExecuTorch without the lines that it and torchao print on stderr while they start.

Both try optional libraries and files of other processors and say so (executorch 1.5.1, torchao 0.18).
Only the start is silenced: what a program says later reaches stderr as ever.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


def start_executorch() -> None:
    """Import ExecuTorch and start its threads; without ExecuTorch, nothing: lowering says what lacks."""
    if find_spec("executorch") is None:
        return
    with _quiet_python():
        import executorch.backends.xnnpack.partition.xnnpack_partitioner  # noqa: F401
        from executorch.extension.pybindings import portable_lib
    with _quiet_native():
        portable_lib._threadpool_get_thread_count()


@contextmanager
def _quiet_python() -> Iterator[None]:
    """No warnings, no logging, and no handler of the root logger that was not there before."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def _quiet_native() -> Iterator[None]:
    """Point file descriptor 2, which native code writes to, at nothing."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
