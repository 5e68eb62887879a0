# SPDX-License-Identifier: Apache-2.0
"""ExecuTorch as this package uses it: imported at use, its faults mended, its noise kept away."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from qompose import TargetError
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

QUANTIZE = "quantized_decomposed.quantize_"
DEQUANTIZE = "quantized_decomposed.dequantize_"

# message, category and why it is not the user's business (all seen with executorch 1.5.1)
QUIET: tuple[tuple[str, type[Warning], str], ...] = (
    ("(read_text|open_text|read_binary) is deprecated", DeprecationWarning, "its resource files"),
    ("`torch.jit.script_method` is deprecated", DeprecationWarning, "torchao imports torch.jit"),
    ("This API is experimental and subject to change", Warning, "its bindings, on import"),
    ("`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning, "copies export specs"),
)


class MissingExecutorchError(TargetError, ImportError):
    """ExecuTorch, which the ``executorch`` target needs, cannot be imported."""

    def __init__(self, cause: ImportError) -> None:
        super().__init__(
            f"the executorch target needs executorch, which failed to import ({cause}). "
            'Install it with: pip install "qompose-xnnpack[executorch]"',
            name=cause.name,
        )


class ExecutorchTargetError(TargetError, RuntimeError):
    """The graph cannot become a program, or the runtime refuses the program."""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """What this module uses of ExecuTorch's ahead-of-time side."""

    to_edge_transform_and_lower: Any
    partitioner: Any
    config: Any
    shape_pass: Any
    delegate_type: Any
    operator_type: Any
    is_implicit: Any


def import_lowering() -> Lowering:
    """Import what lowering needs. Raises ``MissingExecutorchError``."""
    try:
        # Registers the out variants of quantized_decomposed, also for the running process.
        import executorch.kernels.quantized  # noqa: F401
        from executorch.backends.xnnpack.partition import xnnpack_partitioner
        from executorch.backends.xnnpack.utils.quant_utils import is_tagged_as_implicit_q_dq
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.dialects.edge._ops import EdgeOpOverload
        from executorch.exir.lowered_backend_module import LoweredBackendModule
        from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
    except ImportError as error:
        raise MissingExecutorchError(error) from error

    class CarefulPartitioner(xnnpack_partitioner.XnnpackPartitioner):  # type: ignore[misc]
        def partition(self, exported_program: Any) -> Any:
            result = super().partition(exported_program)
            untag_orphans(result.tagged_exported_program.graph)
            return result

    class DeclaredShapes(ConstraintBasedSymShapeEvalPass):  # type: ignore[misc]
        """Plans memory for the declared sizes.

        Retracing a convolution asks whether the batch is below 16, and ExecuTorch 1.5.1 takes the
        answer for the example batch as a bound: a program declared for 32 would accept 15.
        """

        def __init__(self, declared: dict[Any, Any]) -> None:
            super().__init__()
            self._declared = declared

        def call(self, graph_module: GraphModule) -> Any:
            for size in symbolic_sizes(graph_module):
                size.node.shape_env.var_to_range.update(self._declared)
            return super().call(graph_module)

    return Lowering(
        to_edge_transform_and_lower=to_edge_transform_and_lower,
        partitioner=CarefulPartitioner,
        config=ExecutorchBackendConfig,
        shape_pass=DeclaredShapes,
        delegate_type=LoweredBackendModule,
        operator_type=EdgeOpOverload,
        is_implicit=is_tagged_as_implicit_q_dq,
    )


def import_runtime() -> Any:
    """Return the runtime of this process. Raises ``MissingExecutorchError``."""
    try:
        import executorch.kernels.quantized  # noqa: F401
        from executorch.runtime import Runtime
    except ImportError as error:
        raise MissingExecutorchError(error) from error
    return Runtime.get()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of ``QUIET`` and undo ExecuTorch's ``logging.basicConfig`` on import."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with warnings.catch_warnings():
            for message, category, _ in QUIET:
                warnings.filterwarnings("ignore", message=message, category=category)
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def untag_orphans(graph: Graph) -> None:
    """Unmark boundaries whose operator XNNPACK did not take after all.

    The partitioner (executorch 1.5.1) marks the boundaries of a linear or convolution as folded
    before it rejects it, for want of a quantized output say. They are then delegated alone, and as
    nothing folds them the delegate would return unconverted memory.
    """
    for node in graph.nodes:
        around = list(node.users) if DEQUANTIZE in str(node.target) else node.all_input_nodes[:1]
        tag = node.meta.get("delegation_tag")
        if any(other.meta.get("delegation_tag") != tag for other in around):
            node.meta.pop("IS_IMPLICIT_Q_DQ_TAG", None)


def symbolic_sizes(module: GraphModule) -> Iterator[torch.SymInt]:
    """Yield the symbolic sizes of all tensors of a graph."""
    for node in module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            sizes: tuple[Any, ...] = value.shape if isinstance(value, torch.Tensor) else ()
            yield from (size for size in sizes if isinstance(size, torch.SymInt))
