# SPDX-License-Identifier: Apache-2.0
"""The lowering of Q/DQ graphs to one program that runs on the ExecuTorch runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from qompose.backend import CallSignature, stages
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError, lowering_error
from qompose_xnnpack.executorch_target.executorch_imports import (
    Lowering,
    import_lowering,
    quiet,
)
from qompose_xnnpack.executorch_target.export import export
from qompose_xnnpack.executorch_target.graph_passes import (
    remove_idle_expands,
    reshape_for_xnnpack,
)
from qompose_xnnpack.executorch_target.method_interface import Interface, interface_of
from qompose_xnnpack.executorch_target.partitioner import partitioner_class
from qompose_xnnpack.executorch_target.program import (
    FORWARD,
    INTERFACE,
    ExecutorchProgram,
    Parts,
    method_names,
    packed,
)
from qompose_xnnpack.executorch_target.state import written_buffers


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
    rejects some graphs that lower without an error.

    Raises ``MissingExecutorchError`` without ExecuTorch, ``ExecutorchTargetError`` otherwise.
    """
    signature = CallSignature(example_inputs, example_kwargs or {}, dynamic_shapes)
    return lower_methods({FORWARD: (graph, signature)}, load=load)


def lower_methods(
    methods: Mapping[str, tuple[GraphModule, CallSignature]], *, load: bool = True
) -> ExecutorchProgram:
    """Make one program of several Q/DQ graphs, by the names of its methods; equal constants are shared.

    Raises what ``lower_to_executorch`` does; if there are several, the message names the method.
    """
    names = method_names(methods)
    with stages(len(names) * len(STAGES)) as told:
        begin = {name: partial(_begin_stage, told, name) for name in methods}
        with quiet():
            api = import_lowering()
            exported = {}
            for name, (graph, signature) in methods.items():
                begin[name]("export")
                with _in_method(name, names):
                    exported[name] = export(
                        graph, signature.args, dict(signature.kwargs), signature.dynamic_shapes
                    )
            buffer, parts = _lowered(exported, api, begin)
        program = ExecutorchProgram(buffer, parts)
        for name, method in program.methods.items() if load else ():
            begin[name]("load")
            with _in_method(name, names):
                method.load()
    return program


STAGES: Final = ("export", "to edge", "partition", "delegate", "emit", "load")
"""What happens to each method, as the bar of `lower` names it. The last is left out without `load`."""


def _lowered(
    exported: Mapping[str, ExportedProgram],
    api: Lowering,
    begin: Mapping[str, Callable[[str], None]],
) -> tuple[bytes, Parts]:
    """Return the file, and by method how it is called and what became of its operators.

    Args:
        begin: by method, what is told of its stages; ExecuTorch goes through all methods in each of them.
    """
    interfaces = {name: interface_of(program) for name, program in exported.items()}
    partitioner = partitioner_class(api)
    partitioners = {name: partitioner(begin[name]) for name in exported}
    try:
        edge = api.to_edge_transform_and_lower(
            dict(exported),
            transform_passes=[
                remove_idle_expands,
                partial(reshape_for_xnnpack, view=api.view_copy),
            ],
            partitioner={name: [p] for name, p in partitioners.items()},
        )
        written = written_buffers(edge, exported)
        interfaces = {
            name: replace(i, writes=tuple(written[name])) for name, i in interfaces.items()
        }
        _check_first_runs(interfaces)
        parts = {name: (interfaces[name], partitioners[name].delegation) for name in exported}
        # Its manager takes constant methods only at the start, when nothing is known yet.
        edge._config_methods = {**(edge._config_methods or {}), INTERFACE: packed(parts)}
        config = api.backend_config(
            do_quant_fusion_and_const_prop=True,
            memory_planning_pass=api.memory_planning_pass(
                # What the methods of one program keep must not be where others compute.
                share_mutable_buffers=len(exported) > 1 and any(written.values())
            ),
            sym_shape_eval_pass={
                name: _declared_shapes(api, program.range_constraints, partial(begin[name], "emit"))
                for name, program in exported.items()
            },
        )
        return bytes(edge.to_executorch(config).buffer), parts
    except ExecutorchTargetError:
        raise
    except Exception as error:  # its passes raise bare Exception and AssertionError too
        raise lowering_error(error, exported) from error


def _check_first_runs(interfaces: Mapping[str, Interface]) -> None:
    """Raise ``ExecutorchTargetError`` for methods whose first run, which only sizes memory, writes state."""
    for name, interface in interfaces.items():
        if interface.largest_first and interface.writes:
            raise ExecutorchTargetError(
                f"method {name!r} has means or average pools, dynamic sizes and state "
                f"({', '.join(interface.writes)}). XNNPACK requires a first run with the "
                "largest sizes, which would write to the state. Export the method with fixed "
                "sizes, or pass the state in and out as arguments and results"
            )


def _begin_stage(told: Callable[[str], None], name: str, stage: str) -> None:
    told(f"{name}: {stage}")


def _declared_shapes(api: Lowering, declared: Mapping[Any, Any], begin: Callable[[], None]) -> Any:
    """Return the pass that plans memory for the declared sizes; it calls `begin` first.

    Retracing a convolution asks whether the batch is below 16, and ExecuTorch 1.5.1 takes the answer for
    the example batch as a bound: a program declared for 32 would accept 15.
    """

    class DeclaredShapes(api.shape_pass):  # type: ignore[name-defined, misc]
        def call(self, graph_module: GraphModule) -> Any:
            begin()
            for size in _symbolic_sizes(graph_module):
                size.node.shape_env.var_to_range.update(declared)
            return super().call(graph_module)

    return DeclaredShapes()


def _symbolic_sizes(module: GraphModule) -> Iterator[torch.SymInt]:
    """Yield the symbolic sizes of all tensors of a graph."""
    for node in module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            sizes: tuple[Any, ...] = value.shape if isinstance(value, torch.Tensor) else ()
            yield from (size for size in sizes if isinstance(size, torch.SymInt))


@contextmanager
def _in_method(name: str, names: tuple[str, ...]) -> Iterator[None]:
    """Let errors name the method if there are several."""
    try:
        yield
    except ExecutorchTargetError as error:
        if len(names) > 1:
            error.args = (f"method {name!r}: {error}",)
        raise
