# SPDX-License-Identifier: Apache-2.0
"""Algorithms of other packages: found by entry point, loaded by word, each fault kept apart.

A package offers one by the word that configurations ask for::

    [project.entry-points."qompose.algorithms"]
    stochastic = "my_package:StochasticRounding"

The value is a subclass of `Algorithm` that needs no arguments, or an object of one.
"""

from __future__ import annotations

from functools import cache

from importlib_metadata import EntryPoint

from qompose.algorithms.interface import Algorithm
from qompose.backend.discovery import (
    BROKEN,
    USABLE,
    BackendInfo,
    Health,
    algorithms,
    describe_error,
    import_fault,
)
from qompose.entry_points import ALGORITHM_GROUP
from qompose.errors import ConfigError, PluginError, near_names
from qompose.spec.algorithm_choice import ALGORITHM_WORDS


def load_algorithm(word: str) -> Algorithm:
    """Import the algorithm that an installed package offers by a word, once per process.

    Raises:
        ConfigError: no installed package offers it.
        PluginError: it cannot be imported, or is not an algorithm of that word.
    """
    found = {info.name: info for info in algorithms()}
    if word not in found:
        hint = near_names(word, [*ALGORITHM_WORDS, *found])
        raise ConfigError(
            f"no installed package provides the algorithm {word!r}{hint}. Installed: "
            f"{', '.join(found) or 'none'}"
        )
    outcome = _load(found[word])
    if isinstance(outcome, str):
        raise PluginError(word, found[word].source, outcome, found[word].kind)
    return outcome


def check_algorithm(info: BackendInfo) -> Health:
    """Load a listed algorithm and return whether it can be used."""
    outcome = _load(info)
    return Health(BROKEN, outcome) if isinstance(outcome, str) else Health(USABLE)


@cache
def _load(info: BackendInfo) -> Algorithm | str:
    """Load an algorithm, once; the outcome may be the reason why it cannot be used."""
    if info.problem is not None:
        return info.problem
    if info.name in ALGORITHM_WORDS:
        return f"{info.name!r} is a built-in algorithm of qompose; choose another name"
    try:
        found = EntryPoint(info.name, info.module, ALGORITHM_GROUP).load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a package that exits must not end its host
        return import_fault(error, info.module, info.distribution)
    if isinstance(found, type) and issubclass(found, Algorithm):
        try:
            found = found()
        except Exception as error:
            return f"it cannot be created without arguments: {describe_error(error)}"
    if not isinstance(found, Algorithm):
        return f"its entry point is {found!r}, not a qompose.algorithms.Algorithm"
    if found.word != info.name:
        return f"its name is {found.word!r}, but its entry point is named {info.name!r}"
    return found
