# SPDX-License-Identifier: Apache-2.0
"""Which specifications ask for the same, and so may share an observer."""

from __future__ import annotations

import functools

from qompose.factories import class_of, converts_itself
from qompose.specs import QuantizationSpecBase


def integers_asked(spec: QuantizationSpecBase) -> object:
    """Return what must agree for two points to share: all but how the range is estimated."""
    facts = {k: v for k, v in vars(spec).items() if k != "observer_or_fake_quant_ctr"}
    factory = getattr(spec, "observer_or_fake_quant_ctr", None)
    # What an observer makes that converts itself is read by those alone who asked for it.
    own = class_of(factory) if converts_itself(factory) else None
    return type(spec).__name__, tuple((key, str(value)) for key, value in facts.items()), own


def likeness(spec: QuantizationSpecBase) -> object:
    """Return what two specifications agree in that ask for the same, estimated in the same way."""
    return integers_asked(spec), _factory_key(getattr(spec, "observer_or_fake_quant_ctr", None))


def _factory_key(factory: object) -> object:
    """Return what makes two observer factories the same; partial functions compare by identity only."""
    partial = getattr(factory, "p", factory)  # torch.ao's PartialWrapper holds a functools.partial
    if not isinstance(partial, functools.partial):
        return factory
    arguments = tuple((k, _factory_key(v)) for k, v in sorted(partial.keywords.items()))
    key = partial.func, partial.args, arguments
    try:
        hash(key)
    except TypeError:  # arguments of other packages need not be hashable
        return partial.func, repr(partial.args), repr(arguments)
    return key
