# SPDX-License-Identifier: Apache-2.0
"""A lowered model, or the methods of one program, as an AOTInductor package."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Final, NoReturn

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

from qompose.errors import CompilationError, InputError, UserError
from qompose.files import draft_of
from qompose.json_codec import jsonable
from qompose.plan.methods import ONLY, in_method
from qompose.plan.plan import Record
from qompose.program.aliasing import inputs_written, read_before_written, written_buffers
from qompose.program.call_signature import CallSignature
from qompose.program.control_flow import nodes_in
from qompose.program.graph import one_thread_at_a_time, value_of
from qompose.program.meta import KERNELS_TAG, tag_of
from qompose.program.user_input import input_check
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
    results = pytree.tree_leaves(next(iter(reversed(part.graph.graph.nodes))).args[0])
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
        found = self.loader.boxed_run([value for value in values if isinstance(value, Tensor)])
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


def called_as_exported(
    run: Callable[..., Any],
    graph: GraphModule,
    returned: pytree.TreeSpec | None,
    *,
    twice: bool = True,
) -> Callable[..., Any]:
    """Return what checks the inputs of a call, and runs what was compiled of a program.

    Compiled code is for the contiguous inputs of `call_signature`, and reads others as if they were
    contiguous. So others are copied.

    Args:
        run: the compiled code. It takes the values of placeholders, and returns those of the output node.
        returned: what the program makes of those; None if it returns them as they are.
        twice: whether the code knows that one tensor may be given twice, and written to.
    """
    check: Any = input_check(graph).forward  # a module's own call takes as long again
    written = inputs_written(graph.graph)
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]

    def call(*args: Any, **kwargs: Any) -> Any:
        values = check(*args, **kwargs)
        if written:
            _check_apart(values, written, names, twice)
            found = _copied_back(run, values, written)
        else:
            found = run(*map(contiguous, values))
        return found if returned is None else pytree.tree_unflatten(found, returned)

    return call


def _copied_back(run: Callable[..., Any], values: Sequence[Any], written: Sequence[int]) -> Any:
    """Run what writes to the inputs of some places, which get it back where it ran on copies.

    Others must not: they may be expanded.
    """
    copies = [*map(_copying(), values)]
    found = run(*copies)
    for place in written:
        if values[place].data_ptr() != copies[place].data_ptr():
            values[place].detach().copy_(copies[place])
    return found


def _check_apart(
    values: Sequence[Any], written: Sequence[int], names: Sequence[str], twice: bool
) -> None:
    """Refuse inputs that share elements with one that is written, as far as their code does not know it.

    Raises:
        InputError: another input is in the memory of one that is written; the code would read its old value.
    """
    tensors = [(place, value) for place, value in enumerate(values) if isinstance(value, Tensor)]
    for place in written:
        value = values[place]
        if _repeats(value):
            _refuse(names[place], "has several elements in one place")
        for other, it in tensors:
            known = other == place or (twice and _view(it) == _view(value))
            if not known and _share_elements(value, it):
                _refuse(names[place], f"shares memory with input {names[other]}")


def _refuse(name: str, why: str) -> NoReturn:
    given, remedy = f"written to and {why}", "Pass a copy, or call the lowered model uncompiled"
    raise InputError(name, given, "inputs that do not overlap", remedy)


def _repeats(value: Tensor) -> bool:
    """Tell whether elements of a tensor are in one place; mostly its strides tell that they are not."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return len(set(_places(value).tolist())) < value.numel()
        reach += (size - 1) * stride
    return False


def _share_elements(one: Tensor, other: Tensor) -> bool:
    (start, end), (second, last) = _extent(one), _extent(other)
    if end <= second or last <= start:
        return False
    places = (_places(x) * x.element_size() + x.data_ptr() for x in (one, other))
    return bool(torch.isin(*places).any())


def _extent(value: Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor lies."""
    start = value.data_ptr()
    return start, start + (_reach(value) * value.element_size() if value.numel() else 0)


def _reach(value: Tensor) -> int:
    steps = zip(value.shape, value.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _places(value: Tensor) -> Tensor:
    """Return where in its memory each element of a tensor is, counted in elements from its first."""
    return torch.arange(max(_reach(value), 0)).as_strided(value.shape, value.stride()).flatten()


def _view(value: Tensor) -> tuple[object, ...]:
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _copying() -> Callable[[Any], Any]:
    """Return `contiguous`, which gives one tensor for what is given twice, as it may be written to."""
    copies: dict[tuple[object, ...], Tensor] = {}

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        view = _view(x)
        if view not in copies:
            copies[view] = contiguous(x)
        return copies[view]

    return copied


def contiguous(value: Any) -> Any:
    """Return a value, contiguous if it is a tensor. Strides of dimensions of one element, which torch.compile
    compares too, are the usual ones.
    """
    if not isinstance(value, Tensor):
        return value
    dense = value.contiguous()
    if 1 not in dense.shape:
        return dense
    usual = tuple(accumulate(reversed(dense.shape[1:]), mul, initial=1))[::-1]
    return dense if dense.stride() == usual else dense.view(-1).view(dense.shape)


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
