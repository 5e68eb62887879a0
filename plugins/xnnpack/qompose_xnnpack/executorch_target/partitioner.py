# SPDX-License-Identifier: Apache-2.0
"""XNNPACK's partitioner, kept from delegating what makes no program or one that cannot run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.fx import Graph, Node

from qompose_xnnpack.executorch_target.delegation import Delegation
from qompose_xnnpack.executorch_target.delegation_reader import DELEGATION_TAG, DelegationReader
from qompose_xnnpack.executorch_target.executorch_imports import Lowering
from qompose_xnnpack.executorch_target.nodes import DEQUANTIZE

_LISTENING = threading.Lock()
"""Held while the partitioner's reasons are collected: its ``why`` objects belong to the process."""


def partitioner_class(api: Lowering) -> Any:
    """Return the class of partitioners of one program each, with a ``delegation`` once they have run.

    They are made with what is told of each stage that begins.
    """

    class SafePartitioner(api.xnnpack_partitioner):  # type: ignore[name-defined, misc]
        """Partitions one program, corrects the tags, and keeps what became of the operators."""

        delegation: Delegation

        def __init__(self, begin: Callable[[str], None]) -> None:
            super().__init__()
            self._begin = begin
            leave_what_fails(self.target_partitioner_configs, self._has_config)

        def transform_for_pre_decomposition(self, ep: Any) -> Any:
            self._begin("to edge")
            return super().transform_for_pre_decomposition(ep)

        def partition(self, exported_program: Any) -> Any:
            self._begin("partition")
            with collected_reasons(api.partitioner_configs) as reasons:
                result = super().partition(exported_program)
            tagged = result.tagged_exported_program
            untag_unused_conversions(tagged.graph)
            reader = DelegationReader(reasons, self._has_config, api.is_implicit_conversion)
            self.delegation = reader.read(tagged.graph_module)
            self._begin("delegate")
            return result

        def _has_config(self, node: Node) -> bool:
            name = api.format_target_name(getattr(node.target, "__name__", ""))
            return name in self.target_partitioner_configs

    return SafePartitioner


class ReasonLogger:
    """Stands for the logger of a ``why`` object of the partitioner: notes each message, and passes it on."""

    def __init__(self, logger: Any, reasons: dict[str, list[str]]) -> None:
        self._logger, self._reasons = logger, reasons

    def debug(self, message: Any) -> None:
        """Note the reason why a node is left; then do what the logger does with the message."""
        known = self._reasons.setdefault(message.node.name, [])
        if message.reason not in known:
            known.append(message.reason)
        self._logger.debug(message)


@contextmanager
def collected_reasons(package: ModuleType) -> Iterator[dict[str, list[str]]]:
    """Collect the reasons that the partitioner's rules give for what they leave, by node.

    Each module of ``package`` has a ``why`` object that passes them to a logger, at a level that is not
    logged. The logger is left as it is; for a while the object has a ``ReasonLogger`` in front of it.
    """
    reasons: dict[str, list[str]] = {}
    with _LISTENING:
        speakers: list[Any] = [getattr(module, "why", None) for module in vars(package).values()]
        loggers = {id(why): (why, why.logger) for why in speakers if hasattr(why, "logger")}
        try:
            for why, logger in loggers.values():
                why.logger = ReasonLogger(logger, reasons)
            yield reasons
        finally:
            for why, logger in loggers.values():
                why.logger = logger


def leave_what_fails(configs: Mapping[str, Any], has_config: Callable[[Node], bool]) -> None:
    """Change the partitioner's configurations, in place, to leave what makes no program or a broken one."""

    def failure(node: Node) -> str | None:
        if _is_dynamic_image(node, has_config):
            return "XNNPACK cannot run it together with the convolution that quantizes its output"
        if _is_norm_of_grouped_transpose(node):
            return "ExecuTorch cannot fold it into a grouped transposed convolution"
        return None

    def guarded(takes: Callable[[Node, Any], bool], why: Any) -> Callable[[Node, Any], bool]:
        def check(node: Node, program: Any) -> bool:
            if (reason := failure(node)) is None:
                return bool(takes(node, program))
            why(node, reason=reason)
            return False

        return check

    for config in configs.values():
        why = getattr(sys.modules[type(config).__module__], "why", None)
        if why is not None:  # the others are for quantize operators
            config.check_constraints = guarded(config.check_constraints, why)


def _is_dynamic_image(node: Node, has_config: Callable[[Node], bool]) -> bool:
    """Whether a convolution quantizes the value at run time, and the value is padded or has other users.

    In one delegate these make a program that loads and cannot run: the value is laid out channels last
    (executorch 1.5.1).
    """
    others = [user for user in node.users if "quantized_decomposed" not in str(user.target)]
    if not any("choose_qparams.tensor" in str(user.target) for user in node.users):
        return False
    leaves = any(user.op == "output" or not has_config(user) for user in others)
    return leaves or "constant_pad_nd" in str(node.target)


def _is_norm_of_grouped_transpose(node: Node) -> bool:
    """Whether a batch norm reads a transposed convolution with groups.

    The delegate folds the norm into the convolution as if there were no groups, and sizes that do not
    match end the export (executorch 1.5.1).
    """
    if "batch_norm" not in str(node.target):
        return False
    source = node.all_input_nodes[0]
    if "aten_convolution" not in str(source.target).replace(".", "_"):
        return False
    transposed, groups = source.args[6], source.args[8]
    return bool(transposed and groups != 1)


def untag_unused_conversions(graph: Graph) -> None:
    """Unmark quantize and dequantize nodes whose operator XNNPACK did not take after all.

    The partitioner (executorch 1.5.1) marks those around a linear or convolution as folded before it
    rejects the operator, for want of a quantized output for example. They are then delegated alone, and
    as nothing folds them the delegate would return unconverted memory.
    """
    for node in graph.nodes:
        around = list(node.users) if DEQUANTIZE in str(node.target) else node.all_input_nodes[:1]
        tag = node.meta.get(DELEGATION_TAG)
        if any(other.meta.get(DELEGATION_TAG) != tag for other in around):
            node.meta.pop("IS_IMPLICIT_Q_DQ_TAG", None)
