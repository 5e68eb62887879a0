# SPDX-License-Identifier: Apache-2.0
"""Run commands in parallel, print what each printed when it ends, and exit with the number that failed:

python tests/together.py mypy -- python -m sphinx docs build/site
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:  # it is not installed: the others go on
        return subprocess.CompletedProcess(command, 1, str(error))


def main(arguments: list[str]) -> int:
    commands = [[*words] for end, words in itertools.groupby(arguments, "--".__eq__) if not end]
    failed = 0
    with ThreadPoolExecutor() as pool:
        for future in as_completed([pool.submit(run, command) for command in commands]):
            done = future.result()
            print(f"$ {' '.join(done.args)}\n{done.stdout}", flush=True)
            failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
