# SPDX-License-Identifier: Apache-2.0
"""Batches of inputs that users hand in: checked, bound to a program, run on copies, kept."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from qompose.errors import (
    BatchError,
    CalibrationError,
    InputError,
    UserError,
    first_of,
    is_kind,
)
from qompose.program.aliasing import inputs_written
from qompose.program.graph import pytree_info


def iterated(batches: Iterable[Any], function: str) -> Iterator[Any]:
    """Return an iterator over batches.

    Raises:
        UserError: they cannot be iterated, or are a single batch.
    """
    check_several(batches, function)
    try:
        return iter(batches)
    except TypeError:
        raise UserError(
            f"{function} expects an iterable of batches, got {type(batches).__name__}; for a "
            "single batch pass [batch]"
        ) from None


def check_several(batches: object, function: str) -> None:
    """Refuse a single batch where several are expected: iterating a tensor or a dict gives rows or names.

    Raises:
        UserError: it is a single one.
    """
    if isinstance(batches, (Tensor, Mapping)):
        rows = isinstance(batches, Tensor) and batches.dim() > 1
        more = ", or list(tensor) if its slices are the batches" if rows else ""
        raise UserError(
            f"{function} expects several batches, got a single one, {describe(batches)}; pass "
            f"[batch]{more}"
        )


def check_limit(limit: Any) -> None:
    """Check that a limit is None or a number of batches.

    Raises:
        UserError: it is neither.
    """
    if limit is None:
        return
    if not is_kind(limit, int) or limit < 1:
        raise UserError(f"limit must be a positive integer (a number of batches), got {limit!r}")


def run_batch(
    call: Callable[..., Any],
    batch: Any,
    transform: Callable[[Any], Any] | None,
    number: int,
    what: str = "calibration batch",
) -> Any:
    """Call a program, or what takes its place, with the arguments that a batch stands for.

    Args:
        batch: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        transform: turns what was given into that.
        number, what: of the batch, and what it is called, for messages.

    Raises:
        BatchError: it does not fit, or what was called raised an error.
    """
    try:
        batch = transform(batch) if transform else batch
    except Exception as error:
        described = f"{type(error).__name__}: {error}"
        raise BatchError(number, f"cannot be used: transform raised {described}", what) from error
    try:
        args, kwargs = arguments_of(batch)
        return call(*args, **kwargs)
    except CalibrationError as error:
        _check_parameters(call, error)
        raise BatchError(number, f"cannot be used: {error}{_holds(batch)}", what) from error
    except Exception as error:
        described = f"{type(error).__name__}: {error}"
        if isinstance(error, InputError):
            described = str(error)
        elif sparse := _sparse_in(batch):
            described = (
                f"observers take dense tensors, and it has a {sparse} one; pass x.to_dense()"
            )
        raise BatchError(
            number,
            f"cannot be run: {described}. The batch is {describe(batch)}.{_surplus(call, batch)}",
            what,
        ) from error


def _sparse_in(batch: Any) -> torch.layout | None:
    layouts = (leaf.layout for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return next((layout for layout in layouts if layout is not torch.strided), None)


def _check_parameters(call: object, error: CalibrationError) -> None:
    """Name parameters of a program that hold NaN, which no batch is to blame for."""
    graph = getattr(call, "graph", None)
    program = None if graph is None else graph.owning_module
    state = () if program is None else program.named_parameters()
    names = [name for name, value in state if bool(value.isnan().any())]
    if names:
        raise CalibrationError(
            f"{error}, because these parameters of the model contain NaN: {first_of(names, 8)}. "
            "Train or load the model again; the calibration data is not the cause"
        ) from error


def _surplus(call: Callable[..., Any], batch: Any) -> str:
    """Say what to do where a batch has more in it than a program takes: labels, as a rule."""
    graph = getattr(call, "graph", None)
    info = None if graph is None else pytree_info(graph)
    if info is None or not isinstance(batch, (tuple, list)) or len(batch) <= len(info.orig_args):
        return ""
    taken = info.orig_args
    part = "batch[0]" if len(taken) == 1 else f"batch[:{len(taken)}]"
    return (
        f" The model takes {', '.join(taken) or 'no arguments'}; select its inputs with transform=, "
        f"for example transform=lambda batch: {part}."
    )


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a batch stands for.

    Raises:
        CalibrationError: it is not a tensor, a tuple, a list or a dict.
    """
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    raise CalibrationError(
        f"expected a tensor, tuple, list or dict, got {type(batch).__name__}; pass a transform= "
        "that returns one of these"
    )


def _holds(batch: Any) -> str:
    """Say whether a batch has NaN or infinite values, which may come out of a model as NaN."""
    floats = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    floats = [leaf for leaf in floats if leaf.is_floating_point()]
    if any(bool(leaf.isnan().any()) for leaf in floats):
        return "; the batch itself contains NaN"
    if any(bool(leaf.isinf().any()) for leaf in floats):
        return "; the batch itself contains infinite values"
    return ""


def describe(batch: Any) -> str:
    """Return a batch as types and sizes."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return "(" + ", ".join(map(describe, batch)) + ")"
    return type(batch).__name__


def sparing(program: GraphModule) -> Callable[..., Any]:
    """Return what runs a program and leaves its inputs as they are: on copies, if it writes to them.

    A tensor that comes again, such as a cache that goes from batch to batch, is then what the program has
    made of its copy, as in a loop over the program itself; unless somebody else has written to it since.
    """
    (run,) = _on_copies(program, program)
    return run


def _on_copies(program: GraphModule, *runs: GraphModule) -> list[Callable[..., Any]]:
    """Return what takes the inputs of a program; all on the same copies, if the program writes to some."""
    if not inputs_written(program.graph):
        return [*runs]
    carried = _Carried(program)
    return [_OnCopies(run, carried) for run in runs]


class _OnCopies:
    """Runs a program on copies of its inputs."""

    def __init__(self, run: GraphModule, copied: _Carried) -> None:
        self._run, self.graph = run, run.graph
        self._copied = copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies = pytree.tree_map_only(Tensor, self._copied(*args, **kwargs), (args, kwargs))
        return self._run(*copies[0], **copies[1])


class _Carried:
    """Copies of the memory to which a program writes, each kept as long as the memory that it is of."""

    def __init__(self, program: GraphModule) -> None:
        self._bound: Any = input_check(program)
        self._places = inputs_written(program.graph)
        self._kept: dict[int, _Kept] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[[Tensor], Tensor]:
        """Return what gives the place of a call's tensor in the copies; others are not copied."""
        self._kept = {key: kept for key, kept in self._kept.items() if not kept.source.expired()}  # type: ignore[no-untyped-call]
        values = self._bound(*args, **kwargs)
        for value in (values[place] for place in self._places):
            key = value.untyped_storage()._cdata
            if key not in self._kept or not self._kept[key].holds(value):
                self._kept[key] = _Kept.of(value)
        return self._place

    def _place(self, value: Tensor) -> Tensor:
        kept = self._kept.get(value.untyped_storage()._cdata)
        if kept is None:
            return value
        place = (value.storage_offset(), value.size(), value.stride())
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(kept.copy, *place)


@dataclass(frozen=True)
class _Kept:
    """A copy of a memory, with the version that the memory had and a checksum of what was in it.

    Torch counts versions when something is written, though it be the same; numpy and `.data` do not count.
    """

    source: StorageWeakRef
    copy: UntypedStorage
    version: int | None
    checksum: int

    @staticmethod
    def of(value: Tensor) -> _Kept:
        memory = value.untyped_storage()
        version = None if value.is_inference() else value._version
        copied = memory.clone()  # type: ignore[no-untyped-call]
        return _Kept(StorageWeakRef(memory), copied, version, _checksum(memory))  # type: ignore[no-untyped-call]

    def holds(self, value: Tensor) -> bool:
        """Tell whether a memory is as it was.

        Raises:
            CalibrationError: nobody can tell.
        """
        if self.version is None:
            raise CalibrationError(
                "the program writes to a tensor that was made in torch.inference_mode and comes again, "
                "perhaps reset. Make it outside, or pass copies of it"
            )
        unchanged = self.checksum == _checksum(value.untyped_storage())
        return unchanged and self.version == value._version


def _checksum(memory: UntypedStorage) -> int:
    seen = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    return zlib.crc32(seen.cpu().numpy().data)


def binder(program: GraphModule) -> Callable[..., list[Any]]:
    """Return what takes a program's arguments and returns the value of each of its placeholders.

    Those are copies, as `sparing` makes them, if the program writes to its inputs.
    """
    (bound,) = _on_copies(program, input_check(program))
    return bound


def arguments_kept(*args: Any, **kwargs: Any) -> Any:
    """Return arguments, of one kind alone, as a batch whose tensors have memory of their own.

    Whoever gave them may fill their memory with the next batch.
    """
    return pytree.tree_map_only(Tensor, Tensor.clone, kwargs or args)


def keeper(program: GraphModule) -> Callable[..., Any]:
    """Return `arguments_kept`, for batches that a program is going to be run on, once or more.

    A cache to which it writes and that goes from batch to batch is one cache in what is kept, too.
    """
    if not inputs_written(program.graph):
        return arguments_kept
    carried = _Carried(program)

    def keep(*args: Any, **kwargs: Any) -> Any:
        place = carried(*args, **kwargs)

        def own(value: Tensor) -> Tensor:
            copied = place(value)
            return value.clone() if copied is value else copied

        return pytree.tree_map_only(Tensor, own, kwargs or args)

    return keep


class KeptBatches:
    """Runs a program as `sparing` does, and keeps what it reads, in memory of its own.

    A cache that goes from batch to batch is kept as earlier batches left it, so each batch must be run:
    `keep` alone writes nothing to it.
    """

    def __init__(self, program: GraphModule) -> None:
        self.graph = program.graph
        self._run, self._bound = _on_copies(program, program, input_check(program))
        self._inputs: list[Sequence[Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Keep a batch, and run it."""
        self.keep(*args, **kwargs)
        return self._run(*args, **kwargs)

    def keep(self, *args: Any, **kwargs: Any) -> None:
        """Keep a batch, without running it: of a program that leaves nothing behind for the next one."""
        self._inputs.append(arguments_kept(*self._bound(*args, **kwargs)))

    def take(self) -> tuple[list[Sequence[Any]], list[Sequence[Any]]]:
        """Let go of all batches, and return the values of placeholders twice, for two forms of the program.

        Where it writes to its inputs each form has its own.
        """
        given, self._inputs = self._inputs, []
        written = inputs_written(self.graph)
        return given, [arguments_kept(*batch) for batch in given] if written else given


def input_check(program: GraphModule) -> GraphModule:
    """Return what checks a program's arguments as it does, and returns those of its placeholders."""
    graph = Graph()
    graph._codegen = copy.copy(program.graph._codegen)
    placeholders: list[Node] = []
    for node in program.graph.find_nodes(op="placeholder"):
        placeholders.append(graph.node_copy(node))
    graph.output(placeholders)
    info = pytree_info(graph)
    if info is not None:
        graph._codegen.pytree_info = info._replace(out_spec=None)  # type: ignore[attr-defined]
    return GraphModule({}, graph)
