# SPDX-License-Identifier: Apache-2.0
"""The ``executorch`` target: Q/DQ graphs become a program that runs on the ExecuTorch runtime.

``lower_to_executorch`` and ``lower_methods`` export the graphs, give XNNPACK what its partitioner takes,
and keep what became of every operator. ExecuTorch is an optional dependency, and is imported at use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qompose.backend import CallSignature
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose_xnnpack.edge_passes import without_idle_expands
from qompose_xnnpack.executorch_api import (
    ExecutorchTargetError,
    Lowering,
    import_lowering,
    import_runtime as import_runtime,
    quiet as quiet,
)
from qompose_xnnpack.exporting import export
from qompose_xnnpack.interface import interface_of
from qompose_xnnpack.program import (
    FORWARD as FORWARD,
    INTERFACE,
    ExecutorchProgram as ExecutorchProgram,
    Parts,
    method_names,
    packed,
)
from qompose_xnnpack.refusals import cannot_lower


def lower_to_executorch(
    graph: GraphModule,
    example_inputs: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    load: bool = True,
) -> ExecutorchProgram:
    """Export a Q/DQ ``graph``, delegate to XNNPACK, and return a program with the method ``forward``.

    ``dynamic_shapes`` is as for ``torch.export.export``; each dimension needs an upper bound, for
    which the runtime reserves memory. ``load=True`` also loads the program, because the runtime
    refuses some graphs that lower without a word.

    Raises ``MissingExecutorchError`` without ExecuTorch, ``ExecutorchTargetError`` otherwise.
    """
    signature = CallSignature(example_inputs, example_kwargs or {}, dynamic_shapes)
    return lower_methods({FORWARD: (graph, signature)}, load=load)


def lower_methods(
    methods: Mapping[str, tuple[GraphModule, CallSignature]], *, load: bool = True
) -> ExecutorchProgram:
    """Make one program of several Q/DQ graphs, by the names of its methods; equal constants are shared.

    Raises what ``lower_to_executorch`` does; where there are several, the message names the method.
    """
    names = method_names(methods)
    with quiet():
        api = import_lowering()
        exported = {}
        for name, (graph, signature) in methods.items():
            with _in_method(name, names):
                exported[name] = export(
                    graph, signature.args, dict(signature.kwargs), signature.dynamic_shapes
                )
        buffer, parts = _lowered(exported, api)
    program = ExecutorchProgram(buffer, parts)
    if load:
        for name, method in program.methods.items():
            with _in_method(name, names):
                method.load()
    return program


def _lowered(exported: Mapping[str, ExportedProgram], api: Lowering) -> tuple[bytes, Parts]:
    """Return the file, and by method how it is called and what became of its operators."""
    interfaces = {name: interface_of(program) for name, program in exported.items()}
    partitioners = {name: api.partitioner() for name in exported}
    try:
        edge = api.to_edge_transform_and_lower(
            dict(exported),
            transform_passes=[without_idle_expands],
            partitioner={name: [p] for name, p in partitioners.items()},
        )
        parts = {name: (interfaces[name], partitioners[name].delegation) for name in exported}
        # Its manager takes constant methods only at the start, when nothing is known yet.
        edge._config_methods = {**(edge._config_methods or {}), INTERFACE: packed(parts)}
        config = api.config(
            do_quant_fusion_and_const_prop=True,
            sym_shape_eval_pass={
                name: api.shape_pass(program.range_constraints)
                for name, program in exported.items()
            },
        )
        return bytes(edge.to_executorch(config).buffer), parts
    except Exception as error:  # its passes raise bare Exception and AssertionError too
        raise cannot_lower(error, exported) from error


@contextmanager
def _in_method(name: str, names: tuple[str, ...]) -> Iterator[None]:
    """Let errors name the method, where there are several."""
    try:
        yield
    except ExecutorchTargetError as error:
        if len(names) > 1:
            error.args = (f"method {name!r}: {error}",)
        raise
