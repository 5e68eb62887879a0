# SPDX-License-Identifier: Apache-2.0
"""The cases of an algorithm under test: weights of the rules of installed backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from qompose import backends
from qompose.algorithms import OWN, Algorithm, load_algorithm
from qompose.errors import ConfigError, QomposeError
from qompose.spec.algorithm_choice import AlgorithmChoice
from qompose.testing.fixtures import ContractError, expecting
from qompose.testing.suite import BackendSource, Case, Suite
from qompose.testing.trial import Trial

AlgorithmSource: TypeAlias = "str | Algorithm | Callable[[], Algorithm]"
"""The word of an installed algorithm, an algorithm, or a function that returns one."""


@dataclass(frozen=True)
class Place:
    """A rule with a weight, of one backend, under one of its configurations."""

    backend: str
    case: Case

    def __str__(self) -> str:
        return f"{self.backend}-{self.case}"


@dataclass
class AlgorithmSuite:
    """An algorithm under test, and the trials of the places where it is asked for.

    Args:
        chosen: the backends whose weights are changed; none stands for all that are installed.
        most_lost: how many dB the outputs on data alike may lose to weights that are rounded to nearest.
    """

    source: AlgorithmSource
    chosen: Sequence[BackendSource] = ()
    most_lost: float = 3.0
    _refused: str = ""

    def load(self) -> None:
        """Load the algorithm and the backends.

        Raises:
            ContractError: one of them cannot be loaded, or no rule has a weight that it is allowed for.
        """
        if isinstance(self.chosen, str) or not isinstance(self.most_lost, (int, float)):
            raise ContractError(
                self.subject,
                expected="`backends` is a sequence and `most_lost` a number of dB",
                found=f"backends={self.chosen!r}, most_lost={self.most_lost!r}",
                remedy="fix these class attributes",
            )
        if not self.places:
            raise ContractError(
                self.subject,
                expected="an installed backend with a configuration that can request it",
                found=self._refused or ", ".join(self.suites) or "no backend",
                remedy=(
                    "install a backend that quantizes weights, with configurations that support "
                    "the algorithm"
                ),
            )

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm.

        Raises:
            ContractError: there is none, or it has no word.
        """
        subject = f"algorithm {self.source!r}"
        remedy = "set `algorithm` to its name or an object, or fix its module or entry point"
        with expecting(subject, "it is installed and can be loaded", remedy):
            found = self._of_word(self.source) if isinstance(self.source, str) else self.source
            made = found if isinstance(found, Algorithm) else found()
        if not isinstance(made, Algorithm) or not (made.word and isinstance(made.word, str)):
            raise ContractError(
                subject,
                expected="a qompose.algorithms.Algorithm with a `word`",
                found=repr(made),
                remedy=(
                    "set `algorithm` to a name, an Algorithm or a function that returns one, and "
                    "set `word` on its class"
                ),
            )
        return made

    def _of_word(self, word: str) -> Algorithm:
        own = {algorithm.word: algorithm for algorithm in OWN if algorithm.word}
        return own[word] if word in own else load_algorithm(word)

    @property
    def choice(self) -> AlgorithmChoice:
        """The value for `algorithms=` of a configuration."""
        return self.algorithm.word if isinstance(self.source, str) else self.algorithm

    @property
    def subject(self) -> str:
        """The subject of error messages."""
        return f"algorithm {self.algorithm.word!r}"

    @cached_property
    def suites(self) -> dict[str, Suite]:
        """The suites of the backends, by name; of those that can be used here unless they are named."""
        if self.chosen:
            named = [Suite(source) for source in self.chosen]
            return {suite.backend.name: suite for suite in named}
        found = {info.name: Suite(info.name) for info in backends()}
        return {name: suite for name, suite in found.items() if _usable(suite)}

    @cached_property
    def places(self) -> list[Place]:
        """A rule for each operator with a weight, by backend, mode and the kind of the weight's integers."""
        found: dict[tuple[object, ...], Place] = {}
        for name, suite in self.suites.items():
            for case in self._cases(suite):
                operators = suite.examples[case.rule][case.number].operators
                config = suite.configs[case.config]
                key = (name, operators, config.mode, *_kind(config.weight))
                found.setdefault(key, Place(name, case))
        return list(found.values())

    def _cases(self, suite: Suite) -> Iterator[Case]:
        """Yield the rows of single operators with a weight, under what may ask for the algorithm."""
        for case in suite.rows():
            config, rule = suite.configs[case.config], suite.rule(case.rule)
            alone = len(suite.examples[case.rule][case.number].operators) == 1
            if not rule.weight or config.weight is None or not alone:
                continue
            try:
                replace(config, algorithms=(self.choice,))
            except ConfigError as error:  # such as a word of qompose's that is not for this mode
                self._refused = str(error)
                continue
            yield case

    def trial(self, place: Place, *, asked: bool = True) -> Trial:
        """Return the trial of a place, with the algorithm or without any."""
        suite = self.suites[place.backend]
        config = suite.configs[place.case.config]
        config = replace(config, algorithms=(self.choice,) if asked else ())
        name = f"{place.case.config}, {self.algorithm.word if asked else 'no algorithm'}"
        return suite.trial(place.case, name=name, config=config)


def _kind(weight: Any) -> tuple[object, ...]:
    """Return what tells weights apart: their integers, and whether groups have scales; of any size."""
    blocks = getattr(weight, "block_size", None)
    return weight.quant_min, weight.quant_max, weight.dtype, weight.qscheme, blocks is None


def _usable(suite: Suite) -> bool:
    """Tell whether a backend can be used here; its own suite reports what is wrong with it."""
    try:
        return suite.backend.availability() is None
    except (ContractError, QomposeError):
        return False
