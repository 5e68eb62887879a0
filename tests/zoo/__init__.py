# SPDX-License-Identifier: Apache-2.0
"""The zoo of models that tests, benchmarks and documentation share.

`ZOO` holds every small model, names unique. Choose by tag, for example `tagged("bn", "shared")` or
`tagged(without="transformers")` where that package is not installed. `NETWORKS` holds the few of published
size, which are no part of it; `network` gives one of another size or depth.
"""

from __future__ import annotations

from . import (
    attention,
    control_flow,
    convolutional,
    dense_prediction,
    sequence,
    signals,
    signatures,
    tabular,
    topologies,
    transformers_family,
    transformers_signals,
    weights,
)
from .entry import ZooModel
from .networks import NETWORKS, network
from .networks_scenes import images, tokens

__all__ = ["NETWORKS", "ZOO", "ZooModel", "by_name", "images", "network", "tagged", "tokens"]

ZOO: tuple[ZooModel, ...] = (
    *convolutional.MODELS, *dense_prediction.MODELS, *signals.MODELS, *sequence.MODELS, *attention.MODELS,
    *tabular.MODELS, *topologies.MODELS, *weights.MODELS, *signatures.MODELS, *control_flow.MODELS,
    *transformers_family.MODELS, *transformers_signals.MODELS,
)  # fmt: skip


def by_name(name: str) -> ZooModel:
    """The model called `name`. Raises `KeyError` when there is none."""
    return {model.name: model for model in ZOO}[name]


def tagged(*tags: str, without: str | tuple[str, ...] = ()) -> tuple[ZooModel, ...]:
    """Models with every one of `tags` and none of `without`, in the zoo's order."""
    wanted = frozenset(tags)
    unwanted = frozenset((without,) if isinstance(without, str) else without)
    return tuple(m for m in ZOO if wanted <= m.tags and not unwanted & m.tags)
