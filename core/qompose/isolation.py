# SPDX-License-Identifier: Apache-2.0
"""A program of its own: names and ids that nothing else has, and buffers that it may write to."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.fx import GraphModule

from qompose.aliases import written_buffers
from qompose.graph import copies_of, get_attribute, set_attribute
from qompose.nested import name_apart, sink_constants
from qompose.sites import identify


def isolate(exported: GraphModule) -> dict[str, Tensor]:
    """Make a program ready to be annotated, in place: names and ids of its own, and buffers to write to.

    Returns:
        the exported values of the buffers that the program writes to, by path.
    """
    sink_constants(exported)
    name_apart(exported)
    written = sorted(written_buffers(exported.graph))
    state = copies_of({path: get_attribute(exported, path) for path in written})
    restore_written(exported, state)
    identify(exported)
    return state


def restore_written(model: GraphModule, state: Mapping[str, Tensor]) -> None:
    """Give buffers that the program writes to their exported values, in copies of the model's own.

    So neither the caller's model nor a converted one keeps what calibration wrote.
    """
    for path, value in copies_of(state).items():
        set_attribute(model, path, value)
