# SPDX-License-Identifier: Apache-2.0
"""Which algorithms a configuration may name, by word or by object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from qompose.errors import ConfigError, near_names

EQUALIZATION, SMOOTH_QUANT, BIAS_CORRECTION = "equalization", "smooth_quant", "bias_correction"
REPAIRS = (EQUALIZATION, SMOOTH_QUANT, BIAS_CORRECTION)


@dataclass(frozen=True)
class SmoothQuant:
    """The repair "smooth_quant" with a migration strength of one's own, for `repairs=`.

    `alpha`, from 0 to 1, says how much of the difficulty moves from the input into the weights (Xiao et al.,
    "SmoothQuant", 2022). A channel's size is `largest input ** alpha / largest weight ** (1 - alpha)`, and
    its factor the power of two next to that over the median of all sizes, at least 1. None is the word:
    several strengths are tried on calibration data.

    Raises:
        ConfigError: `alpha` is no number from 0 to 1.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is None:
            return
        given: object = self.alpha
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not number or not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={given!r} of SmoothQuant is no number from 0 to 1")
        object.__setattr__(self, "alpha", float(self.alpha))

    def __str__(self) -> str:
        return SMOOTH_QUANT if self.alpha is None else f"{SMOOTH_QUANT} with alpha {self.alpha:g}"


Repair: TypeAlias = str | SmoothQuant
"""What a configuration asks for: one of `REPAIRS`, or one with options of its own."""


def word_of(repair: Any) -> Any:
    """Return the word of a repair that has options; any other is its word."""
    return SMOOTH_QUANT if isinstance(repair, SmoothQuant) else repair


_MODES: Mapping[str, Mapping[str, str]] = {
    SMOOTH_QUANT: {"weight-only": "it divides activations before they are rounded"},
    BIAS_CORRECTION: dict.fromkeys(
        ("weight-only", "dynamic"), "it goes by the means of inputs that are observed"
    ),
}
"""By repair: the modes in which it has nothing to work on, and why."""


def checked_repairs(repairs: object, mode: str, weight: Any) -> tuple[Repair, ...]:
    """Return repairs that a configuration asks for in the order in which they are made, each once.

    Args:
        mode: that of the configuration.
        weight: its specification of weights.

    Raises:
        ConfigError: they are no sequence of known words, the configuration leaves them nothing to do, or one
            is asked for with different options.
    """
    if isinstance(repairs, str) or not isinstance(repairs, (tuple, list)):
        raise ConfigError(f"repairs={repairs!r} is no tuple of words: {', '.join(REPAIRS)}")
    found: dict[str, Repair] = {}
    for repair in repairs:
        word = word_of(repair)
        _check(word, mode, weight)
        plain: Repair = word if repair == SmoothQuant() else repair
        if found.setdefault(word, plain) != plain:
            raise ConfigError(f"repairs asks for {found[word]} and for {plain}: leave one out")
    return tuple(found[word] for word in REPAIRS if word in found)


def _check(word: object, mode: str, weight: Any) -> None:
    if not isinstance(word, str) or word not in REPAIRS:
        hint = near_names(str(word), REPAIRS)
        raise ConfigError(f"there is no repair {word!r}{hint}: {', '.join(REPAIRS)}")
    if weight is None:
        raise ConfigError(f"{word} changes weights, and this configuration leaves them in float")
    reason = _MODES.get(word, {}).get(mode)
    if reason is not None:
        raise ConfigError(f"{word} has no {mode} form: {reason}. Leave it out of repairs")


def not_in_training(claims: Iterable[Any]) -> list[str]:
    """Say of which claims' repairs nothing is made in a program that is to be trained."""
    asked = Counter((claim.owner, word) for claim in claims for word in claim.repairs)
    return [
        f"{owner}: {word} of {number} product{'s' * (number > 1)} was not made: the model is to be trained, "
        "and training finds weights that suit their integers"
        for (owner, word), number in asked.items()
    ]
