# SPDX-License-Identifier: Apache-2.0
"""What a foreign quantizer prints, kept apart; its warnings and log records go where they always go."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from typing import Any

_LOGGER = logging.getLogger("qompose")
_LONGEST = 100


class _Capture:
    """Stands for a stream while a quantizer runs, and keeps what the thread that made it writes.

    Other threads write to the stream itself; so does everybody once `keeping` is over, because handlers
    of loggers may hold on to this.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.kept = stream, io.StringIO()
        self.keeping, self.thread = True, threading.get_ident()

    def write(self, text: str) -> int:
        keeping = self.keeping and threading.get_ident() == self.thread
        written: int = (self.kept if keeping else self.stream).write(text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Output:
    """`sys.stdout` and `sys.stderr`, replaced from when this is made to `undo`.

    Only what is written through these two objects is kept: not what compiled code or a child process
    writes, nor what goes to `sys.stdout.buffer` or `sys.__stdout__`.
    """

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {"stdout": sys.stdout, "stderr": sys.stderr}
        self.captures = {
            name: _Capture(stream)
            for name, stream in self.streams.items()
            if stream is not None  # as in a program without a console
        }
        self.show_warning, self.last_resort = warnings.showwarning, logging.lastResort
        for name, capture in self.captures.items():
            setattr(sys, name, capture)
        warnings.showwarning = self._let_through
        self.logs = self._handler_of_last_resort()
        logging.lastResort = self.logs

    def _let_through(self, *arguments: Any, **options: Any) -> None:
        """Show a warning on the streams that were there before, in the way that was set before."""
        replaced = {name: getattr(sys, name) for name in self.streams}
        self._set_streams(self.streams)
        try:
            self.show_warning(*arguments, **options)
        finally:
            self._set_streams(replaced)

    def _set_streams(self, streams: dict[str, Any]) -> None:
        for name, stream in streams.items():
            setattr(sys, name, stream)

    def _handler_of_last_resort(self) -> Any:
        """Return what prints records that no handler takes: as before, and on the stream there was before."""
        if self.last_resort is None or self.streams["stderr"] is None:
            return self.last_resort
        handler = logging.StreamHandler(self.streams["stderr"])
        handler.setLevel(self.last_resort.level)
        return handler

    def undo(self) -> list[str]:
        """Put the streams back, and say what was printed; all of it is logged at level DEBUG."""
        said = []
        for name, stream in self.streams.items():
            if getattr(sys, name) is not self.captures.get(name, stream):
                said.append(f"replaced sys.{name}, which was undone")
        self._set_streams(self.streams)
        # A member that enters catch_warnings and never leaves it resets showwarning as well.
        warnings.showwarning = self.show_warning
        if logging.lastResort is self.logs:
            logging.lastResort = self.last_resort
        for name, capture in self.captures.items():
            capture.keeping = False
            text = capture.kept.getvalue()
            if text.strip():
                said.append(_described(name, text))
                _LOGGER.debug("what was printed to %s: %s", name, text)
        return said

    def replay(self) -> None:
        """Print after all what was kept: the member failed, and that may tell why."""
        for capture in self.captures.values():
            capture.stream.write(capture.kept.getvalue())
            capture.kept = io.StringIO()


def _described(name: str, text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    first = lines[0].strip()
    first = first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
    return f"wrote {len(lines)} line{'s' * (len(lines) > 1)} to {name}: {first}"
