# SPDX-License-Identifier: Apache-2.0
"""Errors of a lowered program's operators as it runs, with a note on whose kernel and which layer."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from qompose.plan.plan import Record
from qompose.program.control_flow import graphs_in
from qompose.program.graph import describe
from qompose.program.meta import KERNELS_TAG, STAGE_KEY, claim_of, tag_of


def name_failing_kernels(program: GraphModule) -> None:
    """Let errors of a lowered program's operators say where they were raised, in place.

    Errors of an operator in C++ name neither node nor layer, and `GraphModule` drops their traceback. Python
    has notes from 3.11 on.
    """

    def call(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        try:
            return nn.Module.__call__(module, *args, **kwargs)
        except Exception as error:
            note = _note_on(module, error)
            if note and hasattr(error, "add_note"):
                error.add_note(note)
            raise

    type(program)._wrapped_call = staticmethod(call)  # type: ignore[attr-defined]


def _note_on(module: GraphModule, error: Exception) -> str:
    """Return which operator of a program raised an error, "" where none did."""
    programs = {part.forward.__code__: part for part in graphs_in(module)}
    raising = [frame for frame in _frames(error) if frame[0].f_code in programs]
    if not raising:
        return ""
    frame, line = raising[-1]
    program = programs[frame.f_code]
    written = re.match(r"\s*(\w+)", linecache.getline(frame.f_code.co_filename, line))
    nodes = {node.name: node for node in program.graph.nodes}
    node = nodes.get(written[1]) if written else None
    return "" if node is None else _described(node, module.meta.get(STAGE_KEY))


def _frames(error: Exception) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _described(node: Node, record: Any) -> str:
    """Return a node with the layers and rules that its kernel stands for."""
    within = claim_of(node)
    numbers = tag_of(node, KERNELS_TAG) or (() if within is None else (within,))
    made = record.kernels if isinstance(record, Record) else {}
    claims = [(record.plan.claims[number], made[number]) for number in numbers if number in made]
    kernels = "; ".join(
        f"kernel {kernel!r} of {claim.owner}, rule {claim.rule}, for {', '.join(claim.nodes)}"
        for claim, kernel in claims
    )
    return f"raised by {describe(node)}{f': {kernels}' if kernels else ''}"
