# SPDX-License-Identifier: Apache-2.0
"""What a node of a graph that OpenVINO compiled says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

EIGHT_BITS: Final = ("u8", "i8")


class Facts(NamedTuple):
    """What OpenVINO executes a node as, in what type, and for which operators of the file."""

    kind: str
    precision: str
    names: str


def facts_of(node: Any) -> Facts:
    """Return what a node says; "" of what it does not."""
    facts = node.get_rt_info()
    names = ("layerType", "runtimePrecision", "originalLayersNames")
    return Facts(*(facts[name].astype(str) if name in facts else "" for name in names))


def origins_among(names: str, origins: Mapping[str, str]) -> list[str]:
    """Return the program's nodes that a node is executed for, each once.

    Args:
        names: as in `Facts`.
        origins: by the name of a node in the file, that of the program's node.
    """
    found = (origins.get(name.partition("/")[0]) for name in names.split(","))
    return list(dict.fromkeys(filter(None, found)))


def reads_integers(node: Any) -> bool:
    """Tell whether the first input of a node is integers of eight bits."""
    facts = node.input_values()[0].get_node().get_rt_info()
    return facts["outputPrecisions"].astype(str).partition(",")[0] in EIGHT_BITS
