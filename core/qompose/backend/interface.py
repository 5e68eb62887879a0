# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend: what a plugin brings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from qompose.backend.capabilities import Capabilities, capability_rows
from qompose.backend.rule import Rule
from qompose.console import stages as stages  # public here
from qompose.errors import UserError
from qompose.files import draft_of as draft_of  # public here
from qompose.program.call_interface import (  # public here
    CallArgument as CallArgument,
    CallInterface as CallInterface,
    CallSize as CallSize,
)
from qompose.program.call_signature import CallSignature as CallSignature  # public here
from qompose.program.control_flow import (  # public here
    graphs_in as graphs_in,
    nodes_in as nodes_in,
)
from qompose.program.graph import arguments_of as arguments_of  # public here
from qompose.program.meta import (  # public here
    claim_of as claim_of,
    clear_origin as clear_origin,
    operator_of as operator_of,
    stand_for as stand_for,
)
from qompose.spec.quantization_spec import QuantizationConfig, QuantizationSpecBase

LateOperators: TypeAlias = Mapping[OpOverload, Callable[[Node], None]]
"""By operator, what puts other calls for one of its calls; see `Backend.late_operators`."""


@dataclass(frozen=True)
class Finished:
    """What a target's last step made, and what became of the regions and operators that were left to it.

    `model` is what the user gets; `kernels` and `fallbacks` are by claim number: the kernel that runs the
    region, or the reason why none does. `remarks` are by the operator's name in the exported program, of
    operators that no kernel runs: what they end as in the runtime. Reports put them behind the reason why
    the operator is float. `notes` are lines about the whole program, and stand among those of reports.

    Of each node of the graph that a last step gets, `claim_of` returns the claim's number and `operator_of`
    the operator's name. Both survive another export.
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

    With `reads_qdq` the runtime reads quantize and dequantize operators and fuses what it can: the regions
    of members that only annotate are left to it, and `Finished` says what became of them.

    A last step that takes long says what it is at by `stages`, which shows a bar where `lower` is to.

    With `runs_here` a program of the runtime runs in the process that made it: `lower` warns where
    `Backend.objection` has something against this machine. Other programs are for other machines.
    """

    name: str
    finish: Callable[[GraphModule, CallSignature], Finished]
    availability: Callable[[], str | None] = lambda: None
    finish_methods: Callable[[Methods], tuple[Any, Mapping[str, Finished]]] | None = None
    reads_qdq: bool = False
    runs_here: bool = False


@dataclass(frozen=True)
class RuleUse:
    """One use of a rule in a converted model: its mode, and the specification of each role.

    The roles are those of the rule's pattern ("input", "weight", ...) and "output"; what shares the
    parameters of another tensor has that tensor's specification.
    """

    rule: str
    mode: str
    specs: Mapping[str, QuantizationSpecBase]


class Backend:
    """Base of a plugin's backend. Everything but the attributes follows from the rule table.

    Attributes:
        name: the entry point's name.
        api_version: the version of this interface that the backend was written for, as a number: what
            is installed later may be of another one.
        rules: the table, in order of priority.
        configs: named configurations; the first is the default.
        rewrites: tentative graph rewrites the rules want (`qompose.program.rewrites`).
        left_in_float: by operator, why no rule takes it, for reports: that the hardware has no kernel, for
            example. Where a rule says why it does not take a call, that counts.
        targets: the runtimes that this backend brings. "torch" is core's.
        quantizer_class: the quantizer that users construct; None for the generic one.
    """

    name: str = ""
    api_version: int = 0
    rules: tuple[Rule, ...] = ()
    configs: Mapping[str, QuantizationConfig] = MappingProxyType({})
    rewrites: tuple[str, ...] = ()
    left_in_float: Mapping[OpOverload, str] = MappingProxyType({})
    targets: tuple[Target, ...] = ()
    quantizer_class: Callable[[], Any] | None = None

    def availability(self) -> str | None:
        """Return why this backend cannot be used here (a package, a CPU instruction), or None."""
        return None

    def requirements(self, uses: Sequence[RuleUse]) -> Mapping[str, str]:
        """Return what a model asks of the machine that is to run it, as names and values: `{"isa": "vnni"}`.

        `convert_pt2e` asks, with all uses of this backend's rules in the model; the answer stays with it.
        """
        return {}

    def objection(self, requirements: Mapping[str, str]) -> str | None:
        """Return why this machine does not fulfil what `requirements` returned, with the remedy, or None.

        `load` refuses a model that is objected to, and `lower` warns (`Target.runs_here`). Kernels of this
        backend must be right all the same, and may be slow; where its runtime computes wrong numbers, the
        reason says so.
        """
        return None

    def for_compiler(self, graph: GraphModule) -> GraphModule:
        """Return `graph`, lowered for "torch", with operators that compilers know for this backend's own.

        `qompose.compile_lowered` asks every backend that owns claims. An operator that stays as it is, with
        a fake registered, is opaque to compilers, and cannot be in a package. `graph` may be edited; its
        tensors belong to the lowered model.
        """
        return graph

    def join_regions(self, graph: GraphModule, target: str) -> None:
        """Put calls that compute several regions, or what is between them, into a lowered graph, in place.

        `lower` asks every backend that owns claims, when all regions have their kernels. Results may differ
        by the rounding of floats. The node that stood for the last operator keeps its name and `meta`, and a
        new one that does the work of a kernel says so by `stand_for`.
        """

    def late_operators(self) -> LateOperators:
        """Return operators that `for_compiler` leaves in a graph until the compiler's own passes are through.

        Each comes with a function of one of its calls. The function puts other calls before it and instead
        of it, in place: only then may it put one that overwrites a tensor, after a look at who reads that
        later. No such operator is left in what is compiled, so packages may hold them.
        """
        return {}

    def compiler_options(self, graph: GraphModule) -> Mapping[str, Any]:
        """Return options of torch's compiler that this backend's operators in `graph` are faster with.

        They are as `torch.compile` takes them, and say how code is made, never what it computes. `graph` is
        the lowered one, before `for_compiler`, and is only looked at. What a user gives to
        `qompose.compile_lowered` counts before them, and so does a backend whose name comes first; of options
        that are mappings all are put together. One of those names functions of C for operators, which may
        then be in packages (docs/deploying.md).
        """
        return {}

    def without_native_code(self) -> Backend | None:
        """Return this backend without the C++ that its `compiler_options` bring; None: they bring none.

        `for_compiler` and `compiler_options` of the result use operators of torch alone. They count where a
        user asks for it (`qompose.compile_lowered`), or where the C++ does not compile.
        """
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


NATIVE_CODE_VARIABLE: Final = "QOMPOSE_NATIVE_CODE"


def native_code_wanted() -> bool:
    """Return whether backends may compile C++ of their own: unless the environment has QOMPOSE_NATIVE_CODE=0.

    Raises:
        UserError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(NATIVE_CODE_VARIABLE, "1")
    if value not in ("0", "1"):
        raise UserError(
            f"the environment variable {NATIVE_CODE_VARIABLE} must be 0 or 1, got {value!r}"
        )
    return value == "1"
