# SPDX-License-Identifier: Apache-2.0
"""The imports of ExecuTorch, which happen at first use and without its warnings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch.fx import Node

from qompose_xnnpack.executorch_target.errors import MissingExecutorchError

# message, category and origin of warnings that a user can do nothing about (all seen with executorch 1.5.1)
QUIET: tuple[tuple[str, type[Warning], str], ...] = (
    ("(read_text|open_text|read_binary) is deprecated", DeprecationWarning, "its resource files"),
    ("`torch.jit.script_method` is deprecated", DeprecationWarning, "torchao imports torch.jit"),
    ("This API is experimental and subject to change", Warning, "its bindings, on import"),
    (
        "Mutation on a buffer in the model is detected",
        UserWarning,
        "`executorch_target.state` says it",
    ),
    ("`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning, "copies export specs"),
)

# loggers whose warnings are of the same kind: torchao reports libraries for other machines that it cannot
# load, and torch how torchao registers its types (seen with torchao 0.18)
QUIET_LOGGERS = ("torchao", "torch.utils._pytree")


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """What lowering uses of ExecuTorch: modules, classes and functions."""

    to_edge_transform_and_lower: Any
    backend_config: Any
    shape_pass: Any
    memory_planning_pass: Any
    xnnpack_partitioner: Any
    partitioner_configs: ModuleType
    format_target_name: Callable[[str], str]
    is_implicit_conversion: Callable[[Node], bool]
    view_copy: Any


def import_lowering() -> Lowering:
    """Import what lowering needs. Raises ``MissingExecutorchError``."""
    try:
        # Registers the out variants of quantized_decomposed, also for the running process.
        import executorch.kernels.quantized  # noqa: F401
        from executorch.backends.xnnpack.partition import config as configs
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.backends.xnnpack.utils.quant_utils import is_tagged_as_implicit_q_dq
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.backend.canonical_partitioners.config_partitioner import (
            format_target_name,
        )
        from executorch.exir.dialects._ops import ops
        from executorch.exir.passes import MemoryPlanningPass
        from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
    except ImportError as error:
        raise MissingExecutorchError(error) from error

    return Lowering(
        to_edge_transform_and_lower=to_edge_transform_and_lower,
        backend_config=ExecutorchBackendConfig,
        shape_pass=ConstraintBasedSymShapeEvalPass,
        memory_planning_pass=MemoryPlanningPass,
        xnnpack_partitioner=XnnpackPartitioner,
        partitioner_configs=configs,
        format_target_name=format_target_name,
        is_implicit_conversion=is_tagged_as_implicit_q_dq,
        view_copy=ops.edge.aten.view_copy.default,
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
    """Hide what ``QUIET`` and ``QUIET_LOGGERS`` name, and undo ExecuTorch's ``logging.basicConfig``."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {logger: logger.level for logger in map(logging.getLogger, QUIET_LOGGERS)}
    for logger, own in levels.items():
        logger.setLevel(max(own, logging.ERROR))
    try:
        with warnings.catch_warnings():
            for message, category, _ in QUIET:
                warnings.filterwarnings("ignore", message=message, category=category)
            yield
    finally:
        for logger, own in levels.items():
            logger.setLevel(own)
        root.handlers[:] = handlers
        root.setLevel(level)
