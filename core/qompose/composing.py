# SPDX-License-Identifier: Apache-2.0
"""Compose: names of installed backends and quantizers of any engine in, one quantizer out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qompose.errors import PluginError
from qompose.interop import adapt
from qompose.plugins import load_backend
from qompose.quantizer import ComposableQuantizer, Quantizer, RuleQuantizer


def compose(*members: str | Quantizer, on_conflict: str = "error") -> ComposableQuantizer:
    """Compose quantizers, in order of priority. A string is an installed backend with its default config.

    Raises:
        BackendNotFoundError: no such backend is installed.
        PluginError: it is, and cannot be loaded.
        UserError: no members.
    """
    return ComposableQuantizer([_as_quantizer(member) for member in members], on_conflict)


def _as_quantizer(member: str | Quantizer) -> Quantizer:
    if not isinstance(member, str):
        return adapt(member)
    backend = load_backend(member)
    make: Callable[[], Any] = backend.quantizer_class or (lambda: RuleQuantizer(backend))
    quantizer = make()
    if isinstance(quantizer, RuleQuantizer):
        quantizer.set_global(backend.default_config)
    if not isinstance(quantizer, Quantizer):
        reason = f"its quantizer_class made {quantizer!r}, which is no qompose.Quantizer"
        raise PluginError(member, type(backend).__module__, reason)
    return quantizer
