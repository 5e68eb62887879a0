# SPDX-License-Identifier: Apache-2.0
"""A lowered model as an AOTInductor package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch._inductor
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import CompilationError, UserError
from qompose.files import draft_of
from qompose.plan.plan import Record
from qompose.program.aliasing import written_buffers
from qompose.program.call_signature import CallSignature
from qompose.program.control_flow import nodes_in
from qompose.program.decompositions import laid_out, order_of
from qompose.program.meta import KERNELS_TAG, tag_of
from qompose.program.user_input import binder
from qompose.spec.qdq import IN_ATEN

SUFFIX: Final = ".pt2"
TORCH_NAMESPACES: Final = frozenset(
    {"aten", "prims", "inductor_prims", "quantized", "mkl", "mkldnn", "onednn"}
)
"""Operators of these are there as soon as torch is imported."""
# Where a process asks for checks (AOTI_RUNTIME_CHECK_INPUTS=1), a batch of one row is none too small.
_CHECKING: Final = {"aot_inductor.check_lowerbound": False}


def write_package(
    graph: GraphModule,
    signature: CallSignature,
    record: Record,
    file: Path,
    settings: Mapping[str, Any],
    known: Collection[object],
) -> Callable[..., Any]:
    """Write a package that is called as `signature` says, and return what runs it.

    Args:
        known: operators that the settings' passes replace, or come with code for.

    Raises:
        CompilationError: the program writes to buffers; an operator would remain that torch alone does
            not know; torch cannot compile it.
        OSError: the file cannot be written.
    """
    _check_state(graph)
    with torch.no_grad(), _refusing():
        program = torch.export.export(
            graph,
            signature.args,
            dict(signature.kwargs),
            dynamic_shapes=signature.dynamic_shapes,
        )
        if any(node.target in IN_ATEN for node in nodes_in(program.graph_module)):
            program = program.run_decompositions(dict(IN_ATEN))
    _check_outputs(program)
    _check_operators(program, record, known)
    with draft_of(file) as draft, torch.no_grad(), _refusing():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(draft), inductor_configs={**_CHECKING, **settings}
        )
        run = torch._inductor.aoti_load_package(str(draft))
    return partial(_call, run, binder(graph), signature)


def _call(
    run: Callable[..., Any],
    check: Callable[..., Any],
    signature: CallSignature,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a package, which reads the memory of its inputs as if it were that of the examples."""
    check(*args, **kwargs)
    if len(args) == len(signature.args):
        args = tuple(map(_as_exported, args, signature.args))
    known = signature.kwargs
    return run(
        *args, **{k: _as_exported(v, known[k]) if k in known else v for k, v in kwargs.items()}
    )


def _as_exported(value: Any, example: Any) -> Any:
    """Return a value whose tensors lie in memory as those of an example.

    Raises:
        UserError: a tensor has another type.
    """
    if not isinstance(value, Tensor):
        leaves, spec = pytree.tree_flatten(value)
        wanted = pytree.tree_leaves(example)
        if spec.is_leaf() or len(leaves) != len(wanted):
            return value  # a number, or what torch refuses itself
        return pytree.tree_unflatten([*map(_as_exported, leaves, wanted)], spec)
    if not isinstance(example, Tensor) or value.dim() != example.dim():
        return value
    if value.dtype is not example.dtype:
        raise UserError(
            f"this package expects a tensor of {example.dtype}, got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    if example.is_contiguous():
        return value.contiguous()
    order = order_of(example)
    assert order is not None  # of real tensors it is known
    return laid_out(lambda operator, *args: operator(*args), value, order)


def _check_state(graph: GraphModule) -> None:
    written = sorted(written_buffers(graph.graph))
    if written:  # it would compile, and return the first call's results ever after (torch 2.13)
        raise CompilationError(
            f"A package forgets what a program writes to its buffers, here to {', '.join(written)}. "
            'mode="default" keeps it; or pass the state in and out as arguments and results.'
        )


def _check_outputs(program: ExportedProgram) -> None:
    results = program.graph.output_node().args[0]
    missing = [number for number, value in enumerate(results) if value is None]
    if missing:  # torch 2.13 stops at an assertion
        raise CompilationError(
            f"A package returns only tensors, and the model's result {missing[0]}, counted from 0, is None: "
            'leave it out, or compile with mode="default".'
        )


def _check_operators(program: ExportedProgram, record: Record, known: Collection[object]) -> None:
    """Raise CompilationError where a package would need an operator that torch alone does not know."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import fallbacks, lowerings

    left = [
        node
        for node in nodes_in(program.graph_module)
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace not in TORCH_NAMESPACES
        and node.target not in known
        and node.target not in decompositions
        and (node.target not in lowerings or node.target in fallbacks)
    ]
    if left:
        listed = "\n".join(f"  - {line}" for line in dict.fromkeys(_line(n, record) for n in left))
        raise CompilationError(
            f"A package cannot contain operators that torch does not know:\n{listed}\n"
            'mode="default" compiles the model for this process, where these operators are; or leave '
            "them in float."
        )


def _line(node: Node, record: Record) -> str:
    """Name an operator, the one that it stands for, its module and its owner."""
    own = tag_of(node, "claim")
    claims: Sequence[int] = tag_of(node, KERNELS_TAG) or ([] if own is None else [own])
    if not claims:
        return f"{node.name}: {node.target}, which no claim of the model accounts for"
    claim = record.plan.claims[claims[0]]
    module = next((o.module for o in record.plan.operators if o.name == claim.anchor), "")
    why = record.fallbacks.get(claims[0]) or record.kernels.get(claims[0])
    return (
        f"{claim.anchor}{f' in {module}' if module else ''}: {node.target}, of {claim.owner}, rule "
        f"{claim.rule}{f' ({why})' if why else ''}"
    )


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn what torch raises while it compiles into CompilationError."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        raise refused(error) from error


def refused(error: Exception) -> CompilationError:
    """Return the error to raise for one of torch's compiler."""
    inner = getattr(error, "inner_exception", None) or error
    return CompilationError(
        f"torch cannot compile this model: {type(inner).__name__}: {reason_of(inner)} "
        "The lowered model runs without compilation."
    )


def reason_of(error: BaseException) -> str:
    """Return what an error or its cause says: the compiler's first complaint, else the first line."""
    chain = [error, *filter(None, (error.__cause__,))]
    lines = (line.strip() for each in chain for line in str(each).splitlines())
    complaint = next((line for line in lines if " error: " in line), "")
    return f"{complaint.rstrip('.')}." if complaint else first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, as a sentence."""
    lines = (line.strip() for line in str(error).splitlines())
    line = next(filter(None, lines), "no reason given")
    return line if line.endswith(".") else f"{line}."
