# SPDX-License-Identifier: Apache-2.0
"""The ``executorch`` target: a Q/DQ graph becomes a program that runs on the ExecuTorch runtime.

``lower_to_executorch`` exports the graph, gives XNNPACK what its partitioner takes, and reports per
claim what became of it. ExecuTorch is an optional dependency and is imported at use, never before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose_xnnpack.biases import with_own_biases
from qompose_xnnpack.executorch_api import (
    DEQUANTIZE,
    QUANTIZE,
    ExecutorchTargetError,
    Lowering,
    import_lowering,
    import_runtime,
    quiet,
)
from qompose_xnnpack.refusals import cannot_load, cannot_lower, module_of

MEANS = frozenset(
    {
        torch.ops.aten.mean.dim,
        torch.ops.aten.adaptive_avg_pool2d.default,
        torch.ops.aten.avg_pool2d.default,
    }
)
"""Operators that may become XNNPACK's mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator of the lowered program.

    ``name``: such as ``aten.linear.default``; ``claim``: id of the claim it came from, if any;
    ``int8``: whether it computes on int8 tensors (a delegate also runs float operators); ``module``:
    path of the module that it comes from, if known.
    """

    name: str
    claim: int | None
    int8: bool
    module: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegation:
    """Which operators XNNPACK took; quantize, dequantize and bookkeeping nodes are not operators.

    ``delegates``: one tuple of operators for each XNNPACK delegate, in graph order.
    ``portable``: operators left to ExecuTorch's portable kernels.
    """

    delegates: tuple[tuple[Operator, ...], ...]
    portable: tuple[Operator, ...]

    @property
    def delegated_claims(self) -> frozenset[int]:
        """Claims with operators in a delegate and none outside."""
        return _claims(self._delegated()) - _claims(self.portable)

    @property
    def int8_claims(self) -> frozenset[int]:
        """Claims all of whose operators compute on int8 tensors, in a delegate or outside."""
        every = (*self._delegated(), *self.portable)
        return _claims(every) - _claims(op for op in every if not op.int8)

    @property
    def in_float(self) -> tuple[str, ...]:
        """Operators that do not compute on int8 tensors, with their modules where these are known."""
        every = (op for op in (*self._delegated(), *self.portable) if not op.int8)
        return tuple(f"{op.name} in {op.module}" if op.module else op.name for op in every)

    def _delegated(self) -> tuple[Operator, ...]:
        return tuple(op for delegate in self.delegates for op in delegate)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return {
            "delegates": [[asdict(op) for op in delegate] for delegate in self.delegates],
            "portable": [asdict(op) for op in self.portable],
            "delegated_claims": sorted(self.delegated_claims),
            "int8_claims": sorted(self.int8_claims),
        }


def _claims(operators: Iterable[Operator]) -> frozenset[int]:
    return frozenset(op.claim for op in operators if op.claim is not None)


class ExecutorchProgram:
    """A program for the ExecuTorch runtime, and its one loaded method ``forward``.

    ``buffer``: the ``.pte`` file as bytes; ``delegation``: what XNNPACK took; ``first``: inputs that the
    method must run with before any smaller ones, or None (see ``_largest``).
    """

    def __init__(
        self,
        buffer: bytes,
        delegation: Delegation,
        specs: tuple[pytree.TreeSpec, pytree.TreeSpec],
        first: tuple[Any, ...] | None = None,
    ) -> None:
        self.buffer = buffer
        self.delegation = delegation
        self.first = first
        self._in_spec, self._out_spec = specs
        self._program: Any = None
        self._method: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExecutorchProgram:
        return self

    def __del__(self) -> None:
        # The method points into the program and the program into the buffer, without owning them.
        self._method = None
        self._program = None

    @property
    def nbytes(self) -> int:
        """Size of the ``.pte`` file in bytes."""
        return len(self.buffer)

    def save(self, path: str | Path) -> Path:
        """Write the program as a ``.pte`` file and return its path."""
        path = Path(path)
        path.write_bytes(self.buffer)
        return path

    def load(self) -> None:
        """Load the program into the runtime of this process; done by the first ``run`` otherwise.

        Raises ``ExecutorchTargetError`` where the runtime refuses it: an operator without a kernel,
        or a tensor that XNNPACK cannot define.
        """
        if self._method is not None:
            return
        with quiet():
            runtime = import_runtime()
            try:
                self._program = runtime.load_program(self.buffer)
                self._method = self._program.load_method("forward")
                if self.first is not None:
                    self._method.execute(list(self.first))
            except RuntimeError as error:
                raise cannot_load(error, self.delegation.in_float) from error

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` on the runtime; takes and returns what the exported module does.

        Inputs in another memory format are copied to a contiguous one first.
        """
        self.load()
        names = self._in_spec.child(1).context
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise TypeError(f"the program takes inputs of structure {self._in_spec}, not {spec}")
        flat = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in flat]
        try:
            outputs = self._method.execute(flat)
        except RuntimeError as error:
            shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in flat]
            raise ExecutorchTargetError(f"{error} (inputs: {shapes})") from error
        return pytree.tree_unflatten(outputs, self._out_spec)

    __call__ = run


def lower_to_executorch(
    graph: GraphModule,
    example_inputs: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    load: bool = True,
) -> ExecutorchProgram:
    """Export a Q/DQ ``graph``, delegate to XNNPACK, and return the program.

    ``dynamic_shapes`` is as for ``torch.export.export``; each dimension needs an upper bound, for
    which the runtime reserves memory. ``load=True`` also loads the program, because the runtime
    refuses some graphs that lower without a word.

    Raises ``MissingExecutorchError`` without ExecuTorch, ``ExecutorchTargetError`` otherwise.
    """
    with quiet():
        api = import_lowering()
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.contiguous, (example_inputs, example_kwargs or {})
        )
        exported = torch.export.export(
            with_own_biases(graph), args, kwargs, dynamic_shapes=dynamic_shapes
        )
        _check_bounds(exported)
        _check_zero_points(exported)
        _split_dequantize(exported.graph)
        specs = (exported.call_spec.in_spec, exported.call_spec.out_spec)
        first = _largest(exported)
        try:
            edge = api.to_edge_transform_and_lower(exported, partitioner=[api.partitioner()])
            delegation = _read_delegation(edge.exported_program().graph_module, api)
            config = api.config(
                do_quant_fusion_and_const_prop=True,
                sym_shape_eval_pass=api.shape_pass(exported.range_constraints),
            )
            buffer = bytes(edge.to_executorch(config).buffer)
        except Exception as error:  # its passes raise bare Exception and AssertionError too
            raise cannot_lower(error, exported) from error
    program = ExecutorchProgram(buffer, delegation, specs, first)
    if load:
        program.load()
    return program


def _largest(exported: torch.export.ExportedProgram) -> tuple[Any, ...] | None:
    """Return zeros in the largest shapes of the inputs, where a program with means takes several shapes.

    XNNPACK's int8 mean sizes its workspace in the first run and, in executorch 1.5.1, writes beyond it in
    a later one with a larger batch. Other runtimes of the ``.pte`` file need such a first run too.
    """
    targets = {node.target for node in exported.graph.nodes}
    if not exported.range_constraints or targets.isdisjoint(MEANS):
        return None
    upper = {symbol: bounds.upper for symbol, bounds in exported.range_constraints.items()}
    names = set(exported.graph_signature.user_inputs)
    values = [
        n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder" and n.name in names
    ]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    return tuple(
        torch.zeros([_most(size, upper) for size in value.shape], dtype=value.dtype)
        for value in values
    )


def _most(size: Any, upper: dict[Any, Any]) -> int:
    """Return the largest value of a size, which may be an expression of symbols."""
    return size if isinstance(size, int) else int(size.node.expr.subs(upper))


def _split_dequantize(graph: Graph) -> None:
    """Give every user of a dequantized tensor a dequantize node of its own, in place.

    XNNPACK's partitioner marks a dequantize node as folded for all its users as soon as one folds
    it, and a float operator beside that one makes the program unloadable (executorch 1.5.1).
    """
    for node in list(graph.nodes):
        if not str(node.target).startswith(DEQUANTIZE):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))


def _check_bounds(exported: torch.export.ExportedProgram) -> None:
    """Raise ``ExecutorchTargetError`` for dynamic dimensions that can grow without limit."""
    endless = [
        str(symbol)
        for symbol, bounds in exported.range_constraints.items()
        if not bounds.upper < 2**31
    ]
    if endless:
        raise ExecutorchTargetError(
            f"dynamic dimensions {endless} have no upper bound, and the runtime reserves memory "
            "for the largest input: give one, as in torch.export.Dim('batch', max=32)"
        )


def _check_zero_points(exported: torch.export.ExportedProgram) -> None:
    """Raise ``ExecutorchTargetError`` for zero points per channel, which XNNPACK would ignore."""
    constants = {**exported.state_dict, **exported.constants}
    buffers = exported.graph_signature.inputs_to_buffers
    for node in exported.graph.nodes:
        if not str(node.target).startswith(f"{DEQUANTIZE}per_channel"):
            continue
        zero_points = constants.get(buffers.get(getattr(node.args[2], "name", ""), ""))
        if zero_points is None or bool(zero_points.any()):
            raise ExecutorchTargetError(
                f"{node.name}: XNNPACK takes only weights whose zero points per channel are "
                "a buffer of zeros; quantize this weight symmetrically"
            )


def _read_delegation(module: GraphModule, api: Lowering) -> Delegation:
    """Sort the operators of a lowered edge ``module``; ``meta["custom"]`` came through unharmed."""
    delegates = []
    portable = []
    for node in module.graph.nodes:
        inner = getattr(module, node.target, None) if node.op == "get_attr" else None
        if isinstance(inner, api.delegate_type):
            nodes = inner.original_module.graph.nodes
            delegates.append(
                tuple(_operator(n, api, delegated=True) for n in nodes if _computes(n, api))
            )
        elif _computes(node, api):
            portable.append(_operator(node, api, delegated=False))
    return Delegation(delegates=tuple(delegates), portable=tuple(portable))


def _computes(node: Node, api: Lowering) -> bool:
    """Whether ``node`` is an operator on tensors, rather than a boundary or bookkeeping."""
    return (
        isinstance(node.target, api.operator_type)
        and not _name(node).startswith((QUANTIZE, DEQUANTIZE))
        and isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    )


def _name(node: Node) -> str:
    schema = node.target._schema  # type: ignore[union-attr]
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"


def _operator(node: Node, api: Lowering, *, delegated: bool) -> Operator:
    name = _name(node)
    custom = node.meta.get("custom") or {}
    # The portable library has float kernels, and those of quantized_decomposed for packed tables.
    int8 = _is_int8(node, api) if delegated else name.startswith("quantized_decomposed.")
    claim = custom.get("qompose", {}).get("claim")
    return Operator(name=name, claim=claim, int8=int8, module=module_of(node))


def _is_int8(node: Node, api: Lowering) -> bool:
    """Whether XNNPACK folds the dequantizing of the inputs into an int8 kernel.

    Its partitioner marks the dequantize nodes that it folds. Biases are placeholders, and stay in
    float until they are packed. A fused activation has its producer in place of a dequantize node.
    """
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    inputs = [n for n in tensors if n.op != "placeholder"]
    if len(inputs) == 1 and _computes(inputs[0], api):
        return _is_int8(inputs[0], api)
    return bool(inputs) and all(api.is_implicit(n) for n in inputs)
