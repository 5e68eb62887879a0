# SPDX-License-Identifier: Apache-2.0
"""The one zoo of small models that tests, benchmarks and documentation share.

`ZOO` holds every model, names unique. Choose by tag, for example `tagged("bn", "shared")` or
`tagged(without="transformers")` where that package is not installed.
"""

from __future__ import annotations

from . import convolutional, sequence, topologies, transformers_family
from .entry import ZooModel

__all__ = ["ZOO", "ZooModel", "by_name", "tagged"]

ZOO: tuple[ZooModel, ...] = (
    *convolutional.MODELS,
    *sequence.MODELS,
    *topologies.MODELS,
    *transformers_family.MODELS,
)


def by_name(name: str) -> ZooModel:
    """The model called `name`. Raises `KeyError` when there is none."""
    return {model.name: model for model in ZOO}[name]


def tagged(*tags: str, without: str | tuple[str, ...] = ()) -> tuple[ZooModel, ...]:
    """Models with every one of `tags` and none of `without`, in the zoo's order."""
    wanted = frozenset(tags)
    unwanted = frozenset((without,) if isinstance(without, str) else without)
    return tuple(m for m in ZOO if wanted <= m.tags and not unwanted & m.tags)
