# SPDX-License-Identifier: Apache-2.0
"""The buffers that methods write to: one memory for all methods, and initial values.

ExecuTorch plans memory for each method by itself, and its runtime lets the methods of a program share that
memory: what one method keeps there, another overwrites with intermediate values. Its planning pass can set
memory apart for buffers that methods write to, one place for each name (executorch 1.5.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError


def written_buffers(edge: Any, exported: Mapping[str, ExportedProgram]) -> dict[str, list[str]]:
    """Return by method the paths of the buffers that it writes to, and keep their initial values.

    Values that are not zero are stored in the file; the runtime's memory begins with zeros.

    Args:
        edge: ExecuTorch's manager of the delegated methods. Nodes of buffers are marked, in place.
        exported: what the methods were made of.

    Raises:
        ExecutorchTargetError: a delegate keeps a constant copy of a buffer that another method writes to.
    """
    lowered = {name: edge.exported_program(name) for name in exported}
    written = {
        name: sorted(program.graph_signature.buffers_to_mutate.values())
        for name, program in lowered.items()
    }
    shared = {path for paths in written.values() for path in paths}
    for name, program in exported.items():
        nodes = _buffer_nodes(lowered[name])
        for path in shared.intersection(program.graph_signature.inputs_to_buffers.values()):
            if path not in nodes:
                raise ExecutorchTargetError(
                    f"method {name!r} only reads the buffer {path!r}, which another method "
                    f"writes to, so XNNPACK would keep a constant copy of it. Make {name!r} "
                    "write to the buffer too, or pass its value as an input"
                )
            initial = {**lowered[name].state_dict, **lowered[name].constants}[path]
            if initial.any():
                nodes[path].meta["et_init_buffer"] = True
    return written


def loading_note(written: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return what users of a file have to know whose methods share buffers, by method; none where none do."""
    paths = sorted({path for each in written.values() for path in each})
    if not paths or len(written) == 1:
        return ()
    return (
        (
            f"the methods {', '.join(written)} share the buffers {', '.join(paths)}. Other "
            "runtimes must load all methods into the same memory before running any of them, "
            "because loading sets initial values"
        ),
    )


def _buffer_nodes(program: ExportedProgram) -> dict[str, Node]:
    """Return the placeholders of a program's buffers, by path."""
    paths = program.graph_signature.inputs_to_buffers
    nodes = program.graph.find_nodes(op="placeholder")
    return {paths[node.name]: node for node in nodes if node.name in paths}
