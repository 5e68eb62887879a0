# SPDX-License-Identifier: Apache-2.0
"""How many files of core one `qompose.quantize` passes through, and how often it returns to one of them.

A function counts once, at its first call, where someone who follows the call reads it. A stay is a run of
such functions in one file; a return is a stay in a file that was left before. Three paths are counted: that
of the argument `backends` through functions that receive what it becomes (names, quantizers, backends,
claims, plan, record) and pass it on; through all functions that receive it; and that of all functions.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import qompose  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

CORE = Path(qompose.__file__).parent
BACKENDS = ["xnnpack"]
CARRIERS = {"Quantizer", "Backend", "Composition", "Claim", "Plan", "Record", "Annotated"}


def carries(value: Any, depth: int = 2) -> bool:
    """Tell whether a value is what `backends` became, or a collection of that."""
    if isinstance(value, (list, tuple, dict)) and depth:
        items = value.values() if isinstance(value, dict) else value
        return any(carries(item, depth - 1) for item in items)
    if isinstance(value, str):
        return value in BACKENDS
    return any(kind.__name__ in CARRIERS for kind in type(value).__mro__)


class Recorder:
    """A profile function that keeps the functions of core in the order of their first calls.

    Attributes:
        all: their files.
        given: those of functions that are given what `backends` became.
        handing: the functions among these that hand it on.
    """

    def __init__(self) -> None:
        self.all: dict[CodeType, str] = {}
        self.given: dict[CodeType, str] = {}
        self.handing: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(str(CORE))
        if not ours or code.co_name.startswith("<") or _is_importing(frame):
            return
        file = Path(code.co_filename).relative_to(CORE).as_posix()
        self.all.setdefault(code, file)
        if any(map(carries, frame.f_locals.values())):  # at the call, those are its arguments
            self.given.setdefault(code, file)
            self.handing.update(self._giver(frame))

    def _giver(self, frame: FrameType) -> Iterator[CodeType]:
        """Yield the nearest function on the stack that was given it before, if that is another one."""
        caller = frame.f_back
        while caller is not None and caller.f_code not in self.given:
            caller = caller.f_back
        if caller is not None and caller.f_code is not frame.f_code:
            yield caller.f_code

    @property
    def handed_on(self) -> dict[CodeType, str]:
        return {code: file for code, file in self.given.items() if code in self.handing}


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def row(name: str, way: dict[CodeType, str]) -> str:
    stays = [file for file, _ in groupby(way.values())]
    files = len(set(stays))
    return f"| {name} | {len(way)} | {files} | {len(stays)} | {len(stays) - files} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list",
        action="store_true",
        help="also print the path of `backends` where it is passed on",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    inputs, recorder = (torch.randn(1, 3, 8, 8),), Recorder()
    sys.setprofile(recorder)
    try:
        qompose.quantize(model, inputs, backends=BACKENDS, calibration=[inputs])
    finally:
        sys.setprofile(None)
    print("| way | functions | files | stays | returns |\n|---|---|---|---|---|")
    print(row("of `backends`, where it is handed on", recorder.handed_on))
    print(row("of `backends`, wherever it is given", recorder.given))
    print(row("of all functions", recorder.all))
    if options.list:
        way = recorder.handed_on
        for file, codes in groupby(way, way.__getitem__):
            print(f"{file}: {', '.join(code.co_name for code in codes)}")


if __name__ == "__main__":
    main()
