# SPDX-License-Identifier: Apache-2.0
"""How a lowered graph is called: arguments that are tensors go straight to its placeholders.

An exported graph flattens its arguments by their tree and builds its result by another, in Python, at
each call: about twenty microseconds, several times what a small kernel takes. Where every argument and
every result stands for itself there is no tree to walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._pytree import TreeSpec


class DirectCalls(_PyTreeCodeGen):
    """Code that walks no tree where there is none: flat arguments, and one result or a tuple of results."""

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        if not _flat_arguments(self.pytree_info.in_spec):
            return super().gen_var_bindings(fn_args, free_vars, expanded_def)
        placeholders = [variable.split(":")[0].split("#")[0] for variable in free_vars]
        annotations = self._format_annotations(free_vars, expanded_def)
        return f"{annotations}\n    {', '.join(placeholders)}, = {', '.join(self.pytree_info.orig_args)},"

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


def _leaves(spec: TreeSpec) -> bool:
    return all(child.is_leaf() for child in spec.children())


def _flat_arguments(spec: TreeSpec) -> bool:
    """Whether the arguments are tensors one by one, in order or by name."""
    two = spec.type is tuple and spec.num_children == 2
    return two and all(
        part.type is kind and _leaves(part)
        for part, kind in zip(spec.children(), (tuple, dict), strict=True)
    )


def call_directly(module: GraphModule) -> None:
    """Have a graph's code bind its arguments and return its results without their trees, where it may.

    The graph is not compiled anew: `GraphModule.recompile` is the caller's.
    """
    codegen = module.graph._codegen
    if type(codegen) is _PyTreeCodeGen and codegen.pytree_info.in_spec is not None:
        module.graph.set_codegen(DirectCalls(codegen.pytree_info))
