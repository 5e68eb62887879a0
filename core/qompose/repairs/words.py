# SPDX-License-Identifier: Apache-2.0
"""The words for repairs, and which configurations can ask for which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from qompose.errors import ConfigError, near_names

EQUALIZATION, SMOOTH_QUANT, BIAS_CORRECTION = "equalization", "smooth_quant", "bias_correction"
REPAIRS = (EQUALIZATION, SMOOTH_QUANT, BIAS_CORRECTION)

_MODES: Mapping[str, Mapping[str, str]] = {
    SMOOTH_QUANT: {"weight-only": "it divides activations before they are rounded"},
    BIAS_CORRECTION: dict.fromkeys(
        ("weight-only", "dynamic"), "it goes by the means of inputs that are observed"
    ),
}
"""By repair: the modes in which it has nothing to work on, and why."""


def checked_repairs(repairs: object, mode: str, weight: Any) -> tuple[str, ...]:
    """Return repairs that a configuration asks for in the order in which they are made, each once.

    Args:
        mode: that of the configuration.
        weight: its specification of weights.

    Raises:
        ConfigError: they are no sequence of known words, or the configuration leaves them nothing to do.
    """
    if isinstance(repairs, str) or not isinstance(repairs, (tuple, list)):
        raise ConfigError(f"repairs={repairs!r} is no tuple of words: {', '.join(REPAIRS)}")
    for word in repairs:
        if word not in REPAIRS:
            hint = near_names(str(word), REPAIRS)
            raise ConfigError(f"there is no repair {word!r}{hint}: {', '.join(REPAIRS)}")
        if weight is None:
            raise ConfigError(
                f"{word} changes weights, and this configuration leaves them in float"
            )
        reason = _MODES.get(word, {}).get(mode)
        if reason is not None:
            raise ConfigError(f"{word} has no {mode} form: {reason}. Leave it out of repairs")
    return tuple(word for word in REPAIRS if word in repairs)


def not_in_training(claims: Iterable[Any]) -> list[str]:
    """Say of which claims' repairs nothing is made in a program that is to be trained."""
    asked = Counter((claim.owner, word) for claim in claims for word in claim.repairs)
    return [
        f"{owner}: {word} of {number} product{'s' * (number > 1)} was not made: the model is to be trained, "
        "and training finds weights that suit their integers"
        for (owner, word), number in asked.items()
    ]
