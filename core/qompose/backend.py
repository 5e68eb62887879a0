# SPDX-License-Identifier: Apache-2.0
"""What a plugin brings: a name, a rule table, named configurations and, perhaps, a runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule

from qompose.capabilities import Capabilities, capability_rows
from qompose.rules import Rule
from qompose.specs import QuantizationConfig


@dataclass(frozen=True)
class CallSignature:
    """How a program is called: example inputs (of the right shapes; their values mean nothing), and
    which dimensions may vary, in the form that torch.export takes.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any


@dataclass(frozen=True)
class Finished:
    """What a target's last step made, and what became of the regions and operators that were left to it.

    `model` is what the user gets; `kernels` and `fallbacks` are by claim number: the kernel that runs the
    region, or the reason why none does. `remarks` are by the operator's name in the exported program, of
    operators that no kernel runs: what they end as in the runtime. Reports put them behind the reason why
    the operator is float. `notes` are lines about the whole program, and stand among those of reports.

    The graph that a last step gets says of each node what it comes from, in `node.meta["custom"]["qompose"]`:
    `"claim"` is the claim's number, `"operator"` the operator's name. Both outlast another export.
    """

    model: Any
    kernels: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    fallbacks: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    remarks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()


Methods = Mapping[str, tuple[GraphModule, CallSignature]]
"""The methods of one program: by name a graph whose regions have their kernels, and how it is called."""


@dataclass(frozen=True)
class Target:
    """A runtime: its name and the last step of lowering for it.

    `finish` takes the graph whose regions have their kernels, and how it is called. `availability`
    returns why the runtime cannot be used here, with the remedy, or None where it can.

    `finish_methods`, where a program of the runtime may have several methods, takes them all. It returns
    the program and, by the same names, what `finish` would return of each; the `model` of each is what
    reports are asked about. Its errors are to name the method.
    """

    name: str
    finish: Callable[[GraphModule, CallSignature], Finished]
    availability: Callable[[], str | None] = lambda: None
    finish_methods: Callable[[Methods], tuple[Any, Mapping[str, Finished]]] | None = None


class Backend:
    """Base of a plugin's backend. Everything but the attributes follows from the rule table.

    Attributes:
        name: the entry point's name.
        api_version: the version of this interface that the backend was written for, as a number: what
            is installed later may be of another one.
        rules: the table, in order of priority.
        configs: named configurations; the first is the default.
        rewrites: tentative graph rewrites the rules want (`qompose.rewrites`).
        targets: the runtimes that this backend brings. "torch" is core's.
        quantizer_class: the quantizer that users construct; None for the generic one.
    """

    name: str = ""
    api_version: int = 0
    rules: tuple[Rule, ...] = ()
    configs: Mapping[str, QuantizationConfig] = MappingProxyType({})
    rewrites: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    quantizer_class: Callable[[], Any] | None = None

    def availability(self) -> str | None:
        """Return why this backend cannot be used here (a package, a CPU instruction), or None."""
        return None

    def quantization_capabilities(self) -> Capabilities:
        """Return what this backend can do, a row per pattern and named configuration."""
        return capability_rows(self)

    @property
    def default_config(self) -> QuantizationConfig | None:
        """Return the first of the named configurations."""
        return next(iter(self.configs.values()), None)

    def rule(self, name: str) -> Rule | None:
        """Return the rule of a name."""
        return next((rule for rule in self.rules if rule.name == name), None)
