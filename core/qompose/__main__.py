# SPDX-License-Identifier: Apache-2.0
"""`python -m qompose`, and the command `qompose`: the command line in a process of its own."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line of this process, which then ends, and return its exit code."""
    try:
        from qompose.cli.main import main as run  # here, because an interrupt may come meanwhile

        return run()
    except KeyboardInterrupt:
        print("qompose: interrupted", file=sys.stderr)
        return 130
    finally:
        # What runs while the process ends would tell of an interrupt with a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    raise SystemExit(main())
