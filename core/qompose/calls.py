# SPDX-License-Identifier: Apache-2.0
"""How graphs are called: inputs are checked, and those of lowered ones go straight to their placeholders.

An exported graph flattens its arguments by their tree and builds its result by another, in Python, at
each call: about twenty microseconds, several times what a small kernel takes. Where every argument and
every result stands for itself there is no tree to walk; its code goes by the shortcuts that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.fx.graph import PythonCode, _PyTreeCodeGen, _PyTreeInfo
from torch.utils._pytree import TreeSpec

from qompose.input_checks import InputChecks, input_checks, require_input
from qompose.shortcuts import shorten


class CheckedCalls(_PyTreeCodeGen):
    """Code that refuses inputs for which the program was not exported."""

    def __init__(self, pytree_info: _PyTreeInfo, checks: InputChecks) -> None:
        super().__init__(pytree_info)
        self.checks = checks

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [*super().additional_globals(), ("require_input", require_input)]

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        bindings = self.bindings(fn_args, free_vars, expanded_def)
        names = [name for name in _names(free_vars) if name != "self"]
        return "\n    ".join([bindings, *self.checks.lines(names)])

    def bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """Return code that gives each placeholder its value."""
        return super().gen_var_bindings(fn_args, free_vars, expanded_def)


class DirectCalls(CheckedCalls):
    """Code that walks no tree where there is none: flat arguments, and one result or a tuple of results."""

    def bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        if not _flat_arguments(self.pytree_info.in_spec):
            return super().bindings(fn_args, free_vars, expanded_def)
        placeholders = _names(free_vars)
        annotations = self._format_annotations(free_vars, expanded_def)
        return f"{annotations}\n    {', '.join(placeholders)}, = {', '.join(self.pytree_info.orig_args)},"

    def _gen_python_code(
        self, nodes: Any, root_module: str, *rest: Any, **options: Any
    ) -> PythonCode:
        code = super()._gen_python_code(nodes, root_module, *rest, **options)
        return shorten(code, nodes.graph, root_module)

    def generate_output(
        self,
        output_args: Any,
        *,
        descs: Sequence[str] | None = None,
        repr_fn: Callable[[object], str] | None = None,
    ) -> str:
        spec, show = self.pytree_info.out_spec, repr_fn or repr
        if descs is None and spec is not None and spec.is_leaf():
            return f"return {show(output_args[0])}"
        if descs is None and spec is not None and spec.type is tuple and _leaves(spec):
            return f"return {show(tuple(output_args))}"
        return super().generate_output(output_args, descs=descs, repr_fn=repr_fn)


def _names(free_vars: Sequence[str]) -> list[str]:
    return [variable.split(":")[0].split("#")[0].strip() for variable in free_vars]


def _leaves(spec: TreeSpec) -> bool:
    return all(child.is_leaf() for child in spec.children())


def _flat_arguments(spec: TreeSpec) -> bool:
    """Whether the arguments are tensors one by one, in order or by name."""
    two = spec.type is tuple and spec.num_children == 2
    return two and all(
        part.type is kind and _leaves(part)
        for part, kind in zip(spec.children(), (tuple, dict), strict=True)
    )


def check_calls(module: GraphModule) -> GraphModule:
    """Have a program's code check its inputs by the examples of its placeholders; return the program.

    The graph is not compiled anew: `GraphModule.recompile` is the caller's.
    """
    codegen = module.graph._codegen
    if type(codegen) is _PyTreeCodeGen and codegen.pytree_info.in_spec is not None:
        checks = input_checks(module.graph.find_nodes(op="placeholder"))
        module.graph.set_codegen(CheckedCalls(codegen.pytree_info, checks))
    return module


def call_directly(module: GraphModule) -> None:
    """Have a graph's code bind its arguments and return its results without their trees, where it may.

    A GraphModule is called through a function that adds a line of its code to errors, which their tracebacks
    have anyway, and takes a microsecond. Its class is its own, so that this goes without.
    """
    codegen = check_calls(module).graph._codegen
    if type(codegen) is CheckedCalls:
        module.graph.set_codegen(DirectCalls(codegen.pytree_info, codegen.checks))
    module.recompile()
    type(module).__call__ = nn.Module.__call__  # type: ignore[method-assign]
