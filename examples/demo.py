# SPDX-License-Identifier: Apache-2.0
"""The demo: a digit classifier and a pretrained sentence encoder in int8, in about a minute.

    python examples/demo.py          # two tables, and report.html for a browser
    python examples/demo.py --full   # the long pages of digits.py and sentence_encoder.py

`short_demo.py` has what the first one does; it is imported under the progress bar, because torch and
transformers take seconds. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from steps import Steps

STEPS = 14


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, print its tables, and return 1 where a figure is worse than it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true",
                        help="run every engine, also compiled and on ExecuTorch: ten minutes")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE.html",
                        help="where to write the report (default: %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.full:
        import digits
        import sentence_encoder

        return max(digits.main([]), sentence_encoder.main([]))
    with Steps(STEPS) as steps:
        with steps.step("import torch and transformers"):
            import short_demo
        return short_demo.run(options.output, steps)


if __name__ == "__main__":
    sys.exit(main())
