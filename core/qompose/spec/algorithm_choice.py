# SPDX-License-Identifier: Apache-2.0
"""Which algorithms a configuration asks for, by word or as objects (`qompose.algorithms`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, TypeAlias

from qompose.entry_points import ALGORITHM_GROUP, entry_points
from qompose.errors import ConfigError, is_kind, near_names

EQUALIZATION, SMOOTH_QUANT = "equalization", "smooth_quant"
AWQ, SCALE_SEARCH, GPTQ, BIAS_CORRECTION = "awq", "scale_search", "gptq", "bias_correction"
GPTQ_SEQUENTIAL, SIGN_ROUND = "gptq_sequential", "sign_round"
ALGORITHM_WORDS = (
    EQUALIZATION, SMOOTH_QUANT, AWQ, SCALE_SEARCH, GPTQ, GPTQ_SEQUENTIAL, SIGN_ROUND, BIAS_CORRECTION,
)  # fmt: skip
_OWN = "qompose.algorithms:OWN"
"""Where qompose's algorithms are, as entry points say it of others: this floor imports none."""
ROUNDING = (GPTQ, GPTQ_SEQUENTIAL, SIGN_ROUND)
"""Each chooses the integers of weights, so that one of them is enough."""


@dataclass(frozen=True)
class SmoothQuant:
    """The algorithm "smooth_quant" with a chosen migration strength, for `algorithms=`.

    `alpha`, from 0 to 1, says how much of the difficulty moves from the input into the weights (Xiao et al.,
    "SmoothQuant", 2022). A channel's size is `largest input ** alpha / largest weight ** (1 - alpha)`. Its
    factor is that size over the median of all sizes, rounded to a power of `2 ** 0.25`, and at least 1.
    With None, as with the name "smooth_quant", several strengths are tried on calibration data.

    Raises:
        ConfigError: `alpha` is not a number from 0 to 1.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is None:
            return
        if not is_kind(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise ConfigError(
                f"SmoothQuant option alpha must be a number between 0 and 1, got {self.alpha!r}"
            )
        object.__setattr__(self, "alpha", float(self.alpha))

    def __str__(self) -> str:
        return SMOOTH_QUANT if self.alpha is None else f"{SMOOTH_QUANT} with alpha {self.alpha:g}"

    @property
    def word(self) -> str:
        """Return the word that stands for it without options."""
        return SMOOTH_QUANT


class HasWord(Protocol):
    """An algorithm as an object: a `SmoothQuant`, or a `qompose.algorithms.Algorithm`."""

    @property
    def word(self) -> str:
        """Return the word by which it is asked for."""


AlgorithmChoice: TypeAlias = str | HasWord
"""What a configuration asks for: a word of `ALGORITHM_WORDS` or of an installed package, or an object."""


def word_of(choice: Any) -> Any:
    """Return the word of an algorithm that is asked for by an object; any other is its word."""
    return choice if isinstance(choice, str) else getattr(choice, "word", choice)


_MODES: Mapping[str, Mapping[str, str]] = {
    SMOOTH_QUANT: {"weight-only": "it scales activations before they are quantized"},
    AWQ: dict.fromkeys(("static", "dynamic"), "use smooth_quant for layers with quantized inputs"),
}
"""By word: the modes in which it has nothing to work on, and why."""


def checked_algorithms(algorithms: object, mode: str, weight: Any) -> tuple[AlgorithmChoice, ...]:
    """Return algorithms that a configuration asks for in the order in which they are asked.

    Args:
        mode: that of the configuration.
        weight: its specification of weights.

    Raises:
        ConfigError: they are not a sequence of known words and of algorithms, the configuration leaves them
            nothing to do, or one is asked for twice.
    """
    if isinstance(algorithms, str) or not isinstance(algorithms, (tuple, list)):
        raise ConfigError(
            f"algorithms must be a tuple of names or Algorithm objects, got {algorithms!r}"
        )
    found: dict[str, AlgorithmChoice] = {}
    for choice in algorithms:
        word = word_of(choice)
        _check(choice, word, mode, weight)
        plain: AlgorithmChoice = word if _is_ours(choice) and str(choice) == word else choice
        if found.setdefault(word, plain) != plain:
            raise ConfigError(f"algorithms contains both {found[word]} and {plain}; remove one")
    for word, times in Counter(map(word_of, algorithms)).items():
        if times > 1:
            raise ConfigError(
                f"algorithms contains {found[word]} {times} times, but each is applied once; keep one"
            )
    rounding = [str(found[word]) for word in ROUNDING if word in found]
    if len(rounding) > 1:
        raise ConfigError(
            f"{' and '.join(rounding)} cannot be combined, because each chooses the integers "
            "of weights; keep only one in algorithms"
        )
    known = [found.pop(word) for word in ALGORITHM_WORDS if word in found]
    return (*known, *found.values())


def _check(choice: object, word: object, mode: str, weight: Any) -> None:
    if isinstance(choice, type) or not isinstance(word, str) or not word:
        raise ConfigError(f"algorithms must be names or Algorithm objects, got {choice!r}")
    if word in ALGORITHM_WORDS and not (isinstance(choice, str) or _is_ours(choice)):
        raise ConfigError(f"{choice!r} has the name of a built-in algorithm, {word}; rename it")
    if isinstance(choice, str) and word not in ALGORITHM_WORDS:
        installed = sorted(point.name for point in entry_points(ALGORITHM_GROUP))
        if word not in installed:
            known = (*ALGORITHM_WORDS, *installed)
            hint = near_names(word, known)
            raise ConfigError(f"unknown algorithm {word!r}{hint}. Known: {', '.join(known)}")
    if weight is None:
        raise ConfigError(f"{word} requires quantized weights, but this configuration has none")
    reason = _MODES.get(word, {}).get(mode)
    if reason is not None:
        raise ConfigError(
            f"{word} does not support {mode} quantization: {reason}. Remove {word} from algorithms"
        )


def _is_ours(choice: object) -> bool:
    return type(choice).__module__.partition(".")[0] == "qompose"


def algorithm_class(word: object, path: str) -> type:
    """Return the class whose objects ask for an algorithm with options; a package that offers it is imported.

    Args:
        path: where it is asked for, for messages.

    Raises:
        ConfigError: the word has no options, no installed package offers it, or that cannot be imported.
    """
    if word == SMOOTH_QUANT:
        return SmoothQuant
    own: dict[object, type] = {one.word: type(one) for one in resolve_name(_OWN)}
    if is_dataclass(own.get(word)):
        return own[word]
    if word in own:
        raise ConfigError(f"{path}: {word} has no options that can be saved; request it by name")
    points = {point.name: point for point in entry_points(ALGORITHM_GROUP)}
    if word not in points:
        hint = near_names(str(word), (SMOOTH_QUANT, *points))
        raise ConfigError(
            f"{path}: no installed package provides the algorithm {word!r}{hint}, so its options "
            f"cannot be saved or read. Install one with its entry point in {ALGORITHM_GROUP!r}"
        )
    try:
        found = points[str(word)].load()
    except Exception as error:
        raise ConfigError(
            f"{path}: the algorithm {word!r} cannot be imported from {points[str(word)].value}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return found if isinstance(found, type) else type(found)


def wants_bias(asking: Any) -> bool:
    """Tell whether products of a claim or configuration that have no bias get one, to be corrected.

    Where that is left to the engine, only those with static inputs do: others may never see data, and would
    keep a bias of zeros.
    """
    unasked = asking.mode == "static" and BIAS_CORRECTION in asking.unasked
    return unasked or BIAS_CORRECTION in (asking.algorithms or ())


def by_owner(claims: Iterable[Any]) -> Iterator[str]:
    """Yield, for each owner of claims and algorithm that they ask for, both with the number of products."""
    asked = Counter((claim.owner, str(choice)) for claim in claims for choice in claim.algorithms)
    for (owner, choice), number in asked.items():
        yield f"{owner}: {choice} ({number} layer{'s' * (number != 1)})"


def not_in_training(claims: Iterable[Any]) -> list[str]:
    """Say of which claims' algorithms nothing is made in a program that is to be trained."""
    return [
        f"{phrase} was not applied: the model will be trained, which adapts the weights to "
        "their integers"
        for phrase in by_owner(claims)
    ]
