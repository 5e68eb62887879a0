# SPDX-License-Identifier: Apache-2.0
"""A lowered model, or the methods of one program, as an AOTInductor package."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch._inductor
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
)
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import CompilationError, UserError
from qompose.files import draft_of
from qompose.json_codec import jsonable
from qompose.lowering.compiled_call import called_as_exported
from qompose.plan.methods import ONLY, in_method
from qompose.plan.plan import Record
from qompose.program.aliasing import read_before_written, written_buffers
from qompose.program.call_signature import CallSignature
from qompose.program.control_flow import nodes_in
from qompose.program.graph import one_thread_at_a_time, value_of
from qompose.program.meta import KERNELS_TAG, tag_of
from qompose.spec.qdq import IN_ATEN

SUFFIX: Final = ".pt2"
STATE: Final = "state.json"
"""An extra file of a package of several methods: the buffers that they write to, by path."""
_ALONE: Final = "model"
"""What torch calls the only method of a package."""
TORCH_NAMESPACES: Final = frozenset(
    {"aten", "prims", "inductor_prims", "quantized", "mkl", "mkldnn", "onednn"}
)
"""Operators of these are there as soon as torch is imported."""
# Where a process asks for checks (AOTI_RUNTIME_CHECK_INPUTS=1), a batch of one row is none too small.
_CHECKING: Final = {"aot_inductor.check_lowerbound": False}


@dataclass(frozen=True)
class Part:
    """A method of a package, called as `signature` says.

    Attributes:
        settings: of torch's compiler.
        known: operators that the settings' passes replace, or come with code for.
    """

    graph: GraphModule
    signature: CallSignature
    record: Record
    settings: Mapping[str, Any]
    known: Collection[object]


def write_package(
    parts: Mapping[str, Part], state: Mapping[str, Tensor], file: Path
) -> dict[str, Callable[..., Any]]:
    """Write a package of methods by name, and return what runs each.

    A package holds the buffers that its methods write to. torch loads each method with buffers of its own;
    those that are returned share `state`, and the file says how others make it (`STATE`).

    Args:
        state: the buffers that methods write to, by path, with their initial values.

    Raises:
        CompilationError: an operator would remain that torch alone does not know; torch cannot compile a
            method; two buffers that are written to share memory; or one is read before it is written to.
        OSError: the file cannot be written.
    """
    from torch.export.pt2_archive._package import package_pt2

    _check_state(state)
    programs = {}
    for name, part in parts.items():
        with in_method(name):
            _check_reads(part)
            programs[name] = _program(part)
    several = set(parts) != {ONLY}
    with draft_of(file) as draft, torch.no_grad(), _refusing():
        files = {name or _ALONE: _files(programs[name], parts[name], state) for name in parts}
        described = (
            {STATE: json.dumps(_described(state), allow_nan=False)} if several and state else None
        )
        package_pt2(str(draft), aoti_files=files, extra_files=described)
        return {name: _loaded(str(draft), name, parts[name], state) for name in parts}


@one_thread_at_a_time
def _program(part: Part) -> ExportedProgram:
    """Return a method as torch compiles it.

    Raises:
        CompilationError: a package cannot have it.
    """
    with torch.no_grad(), _refusing():
        program = torch.export.export(
            part.graph,
            part.signature.args,
            dict(part.signature.kwargs),
            dynamic_shapes=part.signature.dynamic_shapes,
        )
        if any(node.target in IN_ATEN for node in nodes_in(program.graph_module)):
            program = program.run_decompositions(dict(IN_ATEN))
    _check_outputs(program)
    _check_operators(program, part.record, part.known)
    return program


def _files(program: ExportedProgram, part: Part, state: Mapping[str, Tensor]) -> list[Any]:
    """Compile a program to the files of a package."""
    # Folding takes the initial value of a buffer, if all of it is one number, for a constant (torch 2.13).
    folding = {"joint_graph_constant_folding": False} if state else {}
    args, kwargs = program.example_inputs or ((), {})
    files = torch._inductor.aot_compile(
        program.module(check_guards=False),
        args,
        kwargs,
        options={**_CHECKING, **part.settings, **folding, "aot_inductor.package": True},
    )
    assert isinstance(files, list)
    return files


def _loaded(file: str, name: str, part: Part, state: Mapping[str, Tensor]) -> Callable[..., Any]:
    """Return a method of a package, which writes to `state` if it is one of several.

    Raises:
        CompilationError: torch made a constant of a buffer that the method writes to.
    """
    from torch._inductor.package.package import load_package

    run = load_package(file, name or _ALONE)
    own = {path: state[path] for path in sorted(written_buffers(part.graph.graph))}
    if lost := own.keys() - {*run.get_constant_fqns()}:
        raise CompilationError(
            f"AOTInductor folded mutated buffers into constants: {', '.join(sorted(lost))}. "
            'Use mode="default", or pass the state in and out as arguments and '
            "results."
        )
    if own and name != ONLY:
        run.load_constants(own, check_full_update=False, user_managed=True)
    # Read once: torch reads it on every call, which takes as long as a small model.
    returned = pytree.treespec_loads(run.loader.get_call_spec()[1])
    results = pytree.tree_leaves(part.graph.graph.output_node().args[0])
    numbers = [not isinstance(value_of(r) if isinstance(r, Node) else r, Tensor) for r in results]
    loaded = _Loaded(run.loader, numbers, own)
    return called_as_exported(loaded, part.graph, returned, twice=False)


@dataclass(frozen=True)
class _Loaded:
    """A loaded method, called with the values of the program's placeholders.

    Attributes:
        loader: torch's, which takes and returns lists of tensors.
        numbers: of each result, whether it is a number in the program.
        state: the buffers whose memory it uses, and which it does not keep alive itself.
    """

    loader: Any
    numbers: Sequence[bool]
    state: Mapping[str, Tensor]

    def __call__(self, *values: Any) -> list[Any]:
        found: list[Any] = self.loader.boxed_run(
            [value for value in values if isinstance(value, Tensor)]
        )
        if not any(self.numbers):
            return found
        return [x.item() if number else x for x, number in zip(found, self.numbers, strict=True)]


def _described(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return how buffers are made: shape, type, and a value for all elements or one for each.

    Infinities and NaN, which JSON does not have, are strings.
    """
    found = {}
    for path, value in state.items():
        flat = value.detach().flatten()
        uniform = bool((flat == flat[:1]).all() or flat.isnan().all())
        values = jsonable((flat[:1].tolist() or [0]) if uniform else flat.tolist())
        dtype = str(value.dtype).removeprefix("torch.")
        found[path] = {"shape": [*value.shape], "dtype": dtype, "values": values}
    return found


def _check_state(state: Mapping[str, Tensor]) -> None:
    """Raise CompilationError where buffers share memory, which torch gives each of its own."""
    seen: dict[int, str] = {}
    for path, value in state.items():
        other = seen.setdefault(value.untyped_storage().data_ptr(), path)
        if other != path and value.numel():
            raise CompilationError(
                "AOTInductor packages do not preserve aliasing, but the program mutates "
                f'{other} and {path}, which share storage. Use mode="default".'
            )


def _check_reads(part: Part) -> None:
    """Raise CompilationError where torch would compute with a buffer's initial value in all calls (2.13)."""
    if read := sorted(read_before_written(part.graph.graph)):
        raise CompilationError(
            "buffers that are read before they are written become constants in AOTInductor: "
            f'{", ".join(read)}. Use mode="default", write to them first, or pass the state in and '
            "out as arguments and results."
        )


def _check_outputs(program: ExportedProgram) -> None:
    """Raise CompilationError where a program returns what a package cannot; torch 2.13 hardly says so."""
    specs = program.graph_signature.output_specs  # those of what the program mutates come first
    for number, spec in enumerate(s for s in specs if s.kind is OutputKind.USER_OUTPUT):
        kind = _REFUSED.get(type(spec.arg))
        if isinstance(spec.arg, ConstantArgument) and type(spec.arg.value) is not int:
            kind = repr(spec.arg.value)
        if kind is not None:
            raise CompilationError(
                f"A package returns tensors and whole numbers, but output {number} of the model (counted "
                f'from 0) is {kind}. Remove it, return a tensor, or compile with mode="default".'
            )


_REFUSED: Final[Mapping[type, str]] = {
    SymFloatArgument: "a float that depends on sizes",
    SymBoolArgument: "a bool that depends on sizes",
}


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
            "A package cannot contain these operators from outside torch:\n"
            f"{listed}\n"
            'Use mode="default" to compile for this process. Operators listed with a rule can be '
            "left in float instead."
        )


def _line(node: Node, record: Record) -> str:
    """Name an operator, the one that it stands for, its module and its owner."""
    own = tag_of(node, "claim")
    claims: Sequence[int] = tag_of(node, KERNELS_TAG) or ([] if own is None else [own])
    if not claims:
        return f"{node.name}: {node.target}, which belongs to no claim of the model"
    claim = record.plan.claims[claims[0]]
    module = next((o.module for o in record.plan.operators if o.name == claim.anchor), "")
    why = record.fallbacks.get(claims[0]) or record.kernels.get(claims[0])
    return (
        f"{claim.anchor}{f' in {module}' if module else ''}: {node.target} ({claim.owner}, "
        f"rule {claim.rule}{f', {why}' if why else ''})"
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
    if "serialized_type_name" in str(inner):
        return CompilationError(
            f"A package cannot have what the model takes or returns: {first_line(inner)} For a "
            "dataclass: torch.export.register_dataclass(..., serialized_type_name=...). "
            'mode="default" needs no name.'
        )
    return CompilationError(
        f"torch cannot compile this model: {type(inner).__name__}: {reason_of(inner)} The "
        "lowered model runs without compilation."
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
