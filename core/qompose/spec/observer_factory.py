# SPDX-License-Identifier: Apache-2.0
"""Constructors of observers: `with_args` and its kin, from qompose or another package.

A factory is an observer class, such a class with some of its arguments (`functools.partial`, torch's wrapper
of one, qompose's own), or any function. All are known by their shape.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ObserverFactory:
    """An observer class with some of its arguments; compares by value, unlike functools.partial."""

    observer: type[nn.Module]
    arguments: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.arguments, key=lambda item: item[0])
        object.__setattr__(self, "arguments", tuple(ordered))

    @property
    def __name__(self) -> str:
        """Return the observer's name, by which other engines know whether it takes `ch_axis`."""
        return self.observer.__name__

    def with_args(self, **arguments: Any) -> ObserverFactory:
        """Return a factory with more arguments; a later value for a name replaces the earlier one."""
        merged = {**dict(self.arguments), **arguments}
        return ObserverFactory(self.observer, tuple(merged.items()))

    def __call__(self, **arguments: Any) -> nn.Module:
        return self.observer(**{**dict(self.arguments), **arguments})


_PER_CHANNEL = "PerChannel"


def class_of(factory: Any) -> Any:
    """Return the class whose instances a factory makes; of a function, the function."""
    while not isinstance(factory, type):
        if isinstance(factory, functools.partial):
            factory = factory.func
        elif isinstance(getattr(factory, "p", None), functools.partial):
            factory = factory.p
        elif isinstance(getattr(factory, "observer", None), type):
            factory = factory.observer
        else:
            break
    return factory


def takes_axis(factory: Any, per_channel: bool) -> bool:
    """Tell whether a factory of another engine is given `ch_axis`.

    Engines of this field go by the name of its class alone, and so lose the axis of others that have
    channels. Here those get it too, if they take such an argument.
    """
    kind = class_of(factory)
    if _PER_CHANNEL in getattr(kind, "__name__", ""):
        return True
    parameters = inspect.signature(kind).parameters if per_channel and callable(kind) else {}
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "ch_axis" in parameters or any_keyword


def converts_itself(maker: Any) -> bool:
    """Tell whether an observer, or what a factory makes, replaces its own node when it is converted."""
    if isinstance(maker, nn.Module) and callable(vars(maker).get("convert")):
        return True
    # Of the class, not the instance: qompose's own have a property that is for other engines.
    kind = type(maker) if isinstance(maker, nn.Module) else class_of(maker)
    return callable(getattr(kind, "convert", None))


def made_by(factory: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a factory with arguments that take the place of its own, in the way of this field."""
    with_args = getattr(factory, "with_args", None)
    return factory(**arguments) if with_args is None else with_args(**arguments)()
