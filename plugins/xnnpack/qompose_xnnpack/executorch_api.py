# SPDX-License-Identifier: Apache-2.0
"""ExecuTorch as this package uses it: imported at use, its faults mended, its noise kept away."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from qompose.errors import TargetError
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose_xnnpack.delegation import Delegation
from qompose_xnnpack.partitioning import DEQUANTIZE, Listener, Reader

# message, category and why it is not the user's business (all seen with executorch 1.5.1)
QUIET: tuple[tuple[str, type[Warning], str], ...] = (
    ("(read_text|open_text|read_binary) is deprecated", DeprecationWarning, "its resource files"),
    ("`torch.jit.script_method` is deprecated", DeprecationWarning, "torchao imports torch.jit"),
    ("This API is experimental and subject to change", Warning, "its bindings, on import"),
    ("`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning, "copies export specs"),
)

# loggers whose warnings are of the same kind: torchao tells of libraries for other machines that it cannot
# load, and torch of how torchao registers its types (seen with torchao 0.18)
QUIET_LOGGERS = ("torchao", "torch.utils._pytree")


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


class ExecutorchInputError(ExecutorchTargetError, TypeError):
    """A method was called with other inputs than it takes; the message names the argument."""


_LISTENING = threading.Lock()
"""Held while the partitioner's reasons are heard: its ``why`` objects belong to the process."""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """What this module uses of ExecuTorch's ahead-of-time side."""

    to_edge_transform_and_lower: Any
    partitioner: Any
    config: Any
    shape_pass: Any


def import_lowering() -> Lowering:
    """Import what lowering needs. Raises ``MissingExecutorchError``."""
    try:
        # Registers the out variants of quantized_decomposed, also for the running process.
        import executorch.kernels.quantized  # noqa: F401
        from executorch.backends.xnnpack.partition import config as configs, xnnpack_partitioner
        from executorch.backends.xnnpack.utils.quant_utils import is_tagged_as_implicit_q_dq
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.backend.canonical_partitioners.config_partitioner import (
            format_target_name,
        )
        from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
    except ImportError as error:
        raise MissingExecutorchError(error) from error

    class CarefulPartitioner(xnnpack_partitioner.XnnpackPartitioner):  # type: ignore[misc]
        """Partitions one program, mends the tags, and keeps what became of the operators."""

        delegation: Delegation

        def __init__(self) -> None:
            super().__init__()
            leave_what_breaks(self.target_partitioner_configs, self._knows)

        def partition(self, exported_program: Any) -> Any:
            with heard(configs) as reasons:
                result = super().partition(exported_program)
            tagged = result.tagged_exported_program
            untag_orphans(tagged.graph)
            reader = Reader(reasons, self._knows, is_tagged_as_implicit_q_dq)
            self.delegation = reader.read(tagged.graph_module)
            return result

        def _knows(self, node: Node) -> bool:
            name = format_target_name(getattr(node.target, "__name__", ""))
            return name in self.target_partitioner_configs

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


@contextmanager
def heard(package: ModuleType) -> Iterator[dict[str, list[str]]]:
    """Collect the reasons that the partitioner's rules give for what they leave, by node.

    They go to a ``why`` object of each module of ``package``, and from there to a logger, at a level at
    which it says nothing. The logger is left as it is; the object gets one that also listens.
    """
    reasons: dict[str, list[str]] = {}
    with _LISTENING:
        speakers: list[Any] = [getattr(module, "why", None) for module in vars(package).values()]
        loggers = {id(why): (why, why.logger) for why in speakers if hasattr(why, "logger")}
        try:
            for why, logger in loggers.values():
                why.logger = Listener(logger, reasons)
            yield reasons
        finally:
            for why, logger in loggers.values():
                why.logger = logger


def leave_what_breaks(rules: Mapping[str, Any], knows: Callable[[Node], bool]) -> None:
    """Change the partitioner's rules, in place, to leave what makes no program, or one that cannot run."""

    def harm(node: Node) -> str | None:
        if _is_image_of_run_time(node, knows):
            return "XNNPACK cannot run it with the convolution that quantizes its result"
        if _is_norm_of_groups(node):
            return "ExecuTorch cannot fold it into a transposed convolution with groups"
        return None

    def careful(takes: Callable[[Node, Any], bool], why: Any) -> Callable[[Node, Any], bool]:
        def check(node: Node, program: Any) -> bool:
            if (reason := harm(node)) is None:
                return bool(takes(node, program))
            why(node, reason=reason)
            return False

        return check

    for rule in rules.values():
        why = getattr(sys.modules[type(rule).__module__], "why", None)
        if why is not None:  # the others are for quantize operators
            rule.check_constraints = careful(rule.check_constraints, why)


def _is_image_of_run_time(node: Node, knows: Callable[[Node], bool]) -> bool:
    """Whether a convolution quantizes the value at run time, and more is done with it, or it is padded.

    In one delegate these make a program that loads and cannot run: the value is laid out channels last
    (executorch 1.5.1).
    """
    others = [user for user in node.users if "quantized_decomposed" not in str(user.target)]
    if not any("choose_qparams.tensor" in str(user.target) for user in node.users):
        return False
    leaves = any(user.op == "output" or not knows(user) for user in others)
    return leaves or "constant_pad_nd" in str(node.target)


def _is_norm_of_groups(node: Node) -> bool:
    """Whether a batch norm reads a transposed convolution with groups.

    Its delegate folds the one into the other, and takes the weight for one without groups: sizes that do
    not fit end the export (executorch 1.5.1).
    """
    if "batch_norm" not in str(node.target):
        return False
    source = node.all_input_nodes[0]
    if "aten_convolution" not in str(source.target).replace(".", "_"):
        return False
    transposed, groups = source.args[6], source.args[8]
    return bool(transposed and groups != 1)


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
