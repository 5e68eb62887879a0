# SPDX-License-Identifier: Apache-2.0
"""The rules for caches of keys and values: buffers to which one operator writes rows of floats.

A row, all that is along the last dimension, gets a scale of its own when it is written: keys and values of
one token in one head.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from qompose import QuantizationSpec
from qompose.backend import Guard, Match, OperatorPattern, Rule, kit
from qompose.observers import PlaceholderObserver
from torch import Tensor

from qompose_x86_inductor.configs import CACHE
from qompose_x86_inductor.kernels.cache import kernel

aten = torch.ops.aten
ROWS: Final = QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=PlaceholderObserver,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    is_dynamic=True,
    block_size=(-1,),
)
_SIZES: Final = (2, 2, 16, 8)


def _copies(match: Match) -> str | None:
    """Require that what is counted is not the last dimension."""
    rank, dim = len(kit.shape_of(match.output)), match.argument("output", "dim")
    return None if dim % rank < rank - 1 else "it writes parts of rows"


def _puts(match: Match) -> str | None:
    """Require that values have whole rows, and are not added to what is there."""
    cache, values = (kit.shape_of(match.node(name)) for name in ("self", "values"))
    if match.argument("output", "accumulate"):
        return "it adds to what is there"
    indices = match.argument("output", "indices")
    if len(indices) == len(cache) and indices[-1] is not None:
        return "it writes parts of rows"
    return None if values[-1:] == cache[-1:] else "it writes one value to several places of a row"


def _positions() -> Tensor:
    return torch.tensor([3, 0, 9])


def _written(operator: Any, cache: Tensor, *arguments: Any) -> Tensor:
    """Return the rows of a cache that are not as they were at first."""
    result: Tensor = operator.default(cache, *arguments)
    return result.index_select(2, _positions())


def _rule(name: str, rows: str, pattern: OperatorPattern, guard: Guard) -> Rule:
    return Rule(
        name=name,
        drawing=str(pattern.targets[0]).removeprefix("aten.").removesuffix(".default"),
        patterns=(pattern,),
        activations=(rows,),
        state="self",
        output=False,
        modes=frozenset({"static", "dynamic", "weight-only"}),
        option=CACHE,
        own={"activation": ROWS},
        guard=(kit.float32, guard),
        kernels={"torch": kernel(rows)},
    )


CACHE_RULES: tuple[Rule, ...] = (
    _rule(
        "cache_index_copy",
        "source",
        OperatorPattern(
            (aten.index_copy_.default,),
            lambda self, index, source: _written(aten.index_copy_, self, 2, index, source),
            (_SIZES, _positions, (2, 2, 3, 8)),
        ),
        _copies,
    ),
    _rule(
        "cache_index_put",
        "values",
        OperatorPattern(
            (aten.index_put_.default,),
            lambda self, index, values: _written(
                aten.index_put_, self, [None, None, index], values
            ),
            (_SIZES, _positions, (2, 2, 3, 8)),
        ),
        _puts,
    ),
)
