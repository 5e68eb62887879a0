# SPDX-License-Identifier: Apache-2.0
"""`compile_lowered`: a lowered model compiled for this process, or to a package that needs torch alone.

Parameters become constants of the compiled code ("freezing"), and no gradients are computed. Both hold
for the duration of a call and, as torch's configuration is, for its thread only: nothing global changes.
"""

from __future__ import annotations

import hashlib
import inspect
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from types import FunctionType
from typing import Any, Final, final, overload

import torch._inductor
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes
from torch._inductor.exc import CppCompileError
from torch._inductor.inductor_prims import force_stride_order
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from qompose.backend.interface import Backend, LateOperators
from qompose.errors import (
    CompilationError,
    ConfigError,
    TargetError,
    UserError,
    blaming,
    near_names,
)
from qompose.files import place_for
from qompose.lowering.aoti_package import (
    SUFFIX,
    Part,
    first_line,
    refused,
    write_package,
)
from qompose.lowering.compiled_call import called_as_exported
from qompose.lowering.native_code import with_or_without
from qompose.plan.methods import ONLY, by_method, in_method
from qompose.plan.plan import Record, record_of
from qompose.program.aliasing import inputs_written, written_buffers
from qompose.program.call_signature import CallSignature, call_signature
from qompose.program.control_flow import nodes_in
from qompose.program.decompositions import numbers
from qompose.program.graph import (
    address_of,
    copies_of,
    copy_graph_module,
    freeze,
    get_attribute,
    one_thread_at_a_time,
    pytree_info,
    refresh,
    set_attribute,
    undo_writes,
    value_of,
)
from qompose.program.rewrites import store_computed

PACKAGE: Final = "package"
MODES: Final = ("default", "max-autotune", PACKAGE)
_ABOUT_ITSELF: Final = (
    ".*LeafSpec",
    ".*torch.jit.script_method",
    "bf16 and fp16 are mixed in the scheduler node",
)
"""What torch 2.13 says of itself while it exports, freezes and compiles: deprecations, and that code with two
small float types is not the fastest.
"""


@final
class CompiledModel:
    """A compiled model. It is called as the lowered one is, with the same names of arguments.

    Attributes:
        mode: one of "default", "max-autotune" and "package".
        path: the file of a package, None for the other modes. A temporary one goes with this object.
    """

    def __init__(
        self,
        lowered: GraphModule,
        mode: str,
        run: Callable[..., Any],
        path: Path | None = None,
        folder: _Folder | None = None,
    ) -> None:
        self.mode, self.path = mode, path
        self._folder = folder
        self.__signature__ = inspect.signature(lowered.forward)
        self._run = run
        self._keywords = _keywords(lowered)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the lowered model returns, up to the rounding of float arithmetic.

        Raises:
            TypeError: the arguments are not those of the model.
        """
        positional = len(self.__signature__.parameters) - len(self._keywords)
        if len(args) != positional or kwargs.keys() != self._keywords:
            given = self.__signature__.bind(*args, **kwargs).arguments
            kwargs = {name: given.pop(name) for name in list(given) if name in self._keywords}
            args = tuple(given.values())
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """Return itself: the code is this process's."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to be pickled.

        Raises:
            UserError: always.
        """
        raise UserError(
            "a CompiledModel cannot be pickled: its code belongs to this process. Save the lowered model "
            '(qompose.save) and compile it after loading, or write a package with mode="package"'
        )

    def __repr__(self) -> str:
        where = f", {str(self.path)!r}" if self.path else ""
        return f"<CompiledModel {self.mode!r}{where}>"


@overload
def compile_lowered(
    lowered: GraphModule,
    mode: str = "default",
    *,
    path: str | PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    native_code: bool | None = None,
) -> CompiledModel: ...


@overload
def compile_lowered(
    lowered: Mapping[str, GraphModule],
    mode: str = "default",
    *,
    path: str | PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    native_code: bool | None = None,
) -> dict[str, CompiledModel]: ...


def compile_lowered(
    lowered: GraphModule | Mapping[str, GraphModule],
    mode: str = "default",
    *,
    path: str | PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    native_code: bool | None = None,
) -> CompiledModel | dict[str, CompiledModel]:
    """Compile a model that was lowered for the target "torch", with the shapes that the program records.

    =================  =======================================================================
    mode               what it does
    =================  =======================================================================
    "default"          code for this process; dynamic dimensions may change without compiling again
    "max-autotune"     the same with that mode of `torch.compile`, which benchmarks kernels
    "package"          writes a package, which `torch._inductor.aoti_load_package` loads in a
                       process that imports only torch; the result runs that package
    =================  =======================================================================

    Code computes in the types of the program; `torch.autocast`, here or around a call, does not change them.
    Loops of fixed sizes, and of packages, go on with as many threads as torch had when they were compiled.

    The compiled model has copies of the buffers that the program writes to, with their current values.
    The methods of one program share theirs and are compiled together, all or none; a package has all of
    them, each with its own weights. If a program of dynamic sizes cannot run on zeros, the first two modes
    compile at the first call.

    Args:
        lowered: a lowered model, or the methods of one program by name.
        path: the file of a package, ending in ".pt2"; without it, a temporary file is written. An existing
            file is replaced atomically, and kept if compiling fails.
        options: options of torch's compiler by name, as for `torch.compile`; they override those of
            backends (`Backend.compiler_options`).
        native_code: False compiles without the C++ code of backends. None uses it unless the environment
            has QOMPOSE_NATIVE_CODE=0. If it does not compile, a `QomposeWarning` gives the reason and the
            program runs on torch's operators.

    Raises:
        StageError: the model was not lowered.
        UserError: the mode or an option is unknown, the path is invalid or given for another mode, or a
            method shares state with methods that are not compiled with it.
        TargetError: the model was lowered for another target.
        CompilationError: there is no C++ compiler, torch cannot compile the program, or a package would
            contain an operator that torch does not have, or a buffer that is read before it is written.
        MemberError: a backend cannot rewrite its operators for compilers.
        OSError: the package cannot be written.
    """
    file = _destination(mode, path)
    methods = by_method(lowered, "compile_lowered")
    for name, method in methods.items():
        with in_method(name):
            record = _lowered_record(method)
    if ONLY in methods and record.methods and record.state:
        raise UserError(
            "this model is a method of a program with mutable state; compile its methods ("
            f"{', '.join(record.methods)}) together by passing the whole result "
            "of lower to compile_lowered"
        )
    state = _own_state(methods)
    _check_toolchain()
    with torch.autocast("cpu", enabled=False):
        if mode == PACKAGE:
            compiled = _packaged(methods, file, options, state, native_code)
        else:
            compiled = {}
            for name, method in methods.items():
                with in_method(name):
                    compiled[name] = _compiled_model(method, mode, options, state, native_code)
    return compiled if isinstance(lowered, Mapping) else compiled[ONLY]


def _own_state(methods: Mapping[str, GraphModule]) -> dict[str, Tensor]:
    """Return copies of the buffers that the methods of one program write to, by path.

    Raises:
        UserError: methods have buffers of one name that are not one, or one of them is a constant for torch's
            compiler, because its method only reads it.
    """
    written = {name: written_buffers(method.graph) for name, method in methods.items()}
    found: dict[str, Tensor] = {}
    for name, method in methods.items():
        held = dict(method.named_buffers(remove_duplicate=False))
        for path in sorted(frozenset().union(*written.values()) & held.keys()):
            if address_of(found.setdefault(path, held[path])) != address_of(held[path]):
                raise UserError(
                    f"method {name!r} does not share the buffer {path!r} with other methods; "
                    "lower all methods together, as in lower({name: converted, ...})"
                )
            if path not in written[name]:
                raise UserError(
                    f"method {name!r} only reads the buffer {path!r}, which another method "
                    "writes to, so compiled code would treat the buffer as a constant. Make "
                    f"{name!r} write to the buffer too"
                )
    return copies_of(found)


def _compiled_model(
    lowered: GraphModule,
    mode: str,
    options: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    native_code: bool | None,
) -> CompiledModel:
    """Compile one lowered model for this process; it writes to `state`, by path."""

    def attempt(backends: Mapping[str, Backend]) -> CompiledModel:
        part = _part(lowered, options, state, backends)
        with _quiet():
            run = _compiled(lowered, part.graph, mode, part.settings)
        return CompiledModel(lowered, mode, run)

    return with_or_without(attempt, _taking_part(_lowered_record(lowered)), native_code)


def _part(
    lowered: GraphModule,
    options: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    backends: Mapping[str, Backend],
) -> Part:
    """Return a lowered model as it is compiled, with the settings for it."""
    record = _lowered_record(lowered)
    backends = {owner: backends[owner] for owner in _taking_part(record)}
    settings = {"freezing": True, **_together(_advised(lowered, backends), _checked(options))}
    graph = _for_compilers(lowered, backends, state)
    late = {k: v for backend in backends.values() for k, v in backend.late_operators().items()}
    known = {*late, *settings.get("aot_inductor.custom_ops_to_c_shims", ())}
    return Part(graph, call_signature(lowered), record, settings_with(graph, late, settings), known)


def _packaged(
    methods: Mapping[str, GraphModule],
    file: Path | None,
    options: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    native_code: bool | None,
) -> dict[str, CompiledModel]:
    """Compile methods to one package."""
    concerned: dict[str, Backend] = {}
    for method in methods.values():
        concerned |= _taking_part(_lowered_record(method))

    def attempt(backends: Mapping[str, Backend]) -> dict[str, CompiledModel]:
        parts = {}
        for name, method in methods.items():
            with in_method(name):
                parts[name] = _part(method, options, state, backends)
        folder = _Folder() if file is None else None
        place = file or folder.path / f"model{SUFFIX}"  # type: ignore[union-attr]
        with _quiet():
            runs = write_package(parts, state, place)
        return {
            name: CompiledModel(method, PACKAGE, runs[name], place, folder)
            for name, method in methods.items()
        }

    return with_or_without(attempt, concerned, native_code)


class _Folder:
    """A temporary folder, which goes with the last who holds this."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="qompose-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _destination(mode: str, path: object) -> Path | None:
    """Return the file of the package, None for a temporary one, after checking whatever can be checked."""
    if mode not in MODES:
        close = near_names(str(mode), MODES)
        raise UserError(f"mode must be one of {', '.join(MODES)}, got {mode!r}{close}")
    if path is None:
        return None
    if mode != PACKAGE:
        raise UserError(f'path= requires mode="package", got mode={mode!r}')
    if not isinstance(path, (str, PathLike)):
        raise UserError(f"path must be a str or os.PathLike, got {path!r}")
    file = Path(path)
    if file.suffix != SUFFIX:
        raise UserError(f"path must end in {SUFFIX}, got {file}")
    place_for(file)
    return file


def _lowered_record(lowered: object) -> Record:
    record = record_of(lowered, stages=("lowered",), function="compile", remedy="Call lower first.")
    if record.target != "torch" or not isinstance(lowered, GraphModule):
        raise TargetError(
            f"This model was lowered for {record.target!r}, which does not need compilation. "
            'To compile with torch, lower the converted model with target="torch".'
        )
    return record


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options by the names that torch has for them."""
    if not isinstance(options or {}, Mapping) or not all(isinstance(o, str) for o in options or ()):
        raise UserError(f"options must be a mapping from names to values, got {options!r}")
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    known = torch._inductor.config.get_config_copy()
    unknown = [name for name in given if name not in known]
    if unknown:
        close = near_names(unknown[0], known)
        raise UserError(f"torch's compiler has no option {unknown[0]!r}{close}")
    if not given.get("freezing", True):
        raise UserError('options={"freezing": False} would repack weights on every call; remove it')
    return given


def _check_toolchain() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError) as error:
        raise CompilationError(
            f"torch found no C++ compiler: {first_line(error)} Install one (g++ or clang++), "
            "or set the environment variable CXX. The lowered model runs without one."
        ) from error


def _taking_part(record: Record) -> dict[str, Backend]:
    """Return the backends that own claims in a model."""
    owners = {claim.owner for claim in record.plan.claims}
    return {owner: backend for owner, backend in record.backends.items() if owner in owners}


def _advised(lowered: GraphModule, backends: Mapping[str, Backend]) -> dict[str, Any]:
    """Return the options that backends ask for, for their operators in a model."""
    wanted: dict[str, Any] = {}
    for owner in sorted(backends):
        with blaming(f"backend {owner!r}: compiler_options"):
            given = backends[owner].compiler_options(lowered)
        try:
            wanted = _together(_checked(given), wanted)
        except UserError as error:
            raise ConfigError(f"backend {owner!r}: compiler_options: {error}") from error
    return wanted


def _together(second: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options: where both have one, that of `first` counts; options that map names are merged too."""
    shared = [name for name in first if isinstance(first[name], Mapping) and name in second]
    return {**second, **first, **{name: {**second[name], **first[name]} for name in shared}}


def _for_compilers(
    lowered: GraphModule, backends: Mapping[str, Backend], state: Mapping[str, Tensor]
) -> GraphModule:
    """Return a copy whose operators compilers know, as far as their backends can rewrite them.

    It is a copy because backends edit it. Buffers that the program writes to are those of `state`; all other
    memory is shared with `lowered`, which may be converted to another type: its parameters then are others.
    """
    graph = copy_graph_module(lowered)
    store_computed(graph)
    for owner, backend in backends.items():
        with blaming(f"backend {owner!r}: for_compiler"):
            graph = backend.for_compiler(graph)
        if not isinstance(graph, GraphModule):
            raise ConfigError(
                f"backend {owner!r}: for_compiler must return a GraphModule, got {graph!r}"
            )
    for path in sorted(written_buffers(graph.graph)):
        set_attribute(graph, path, state[path])
    freeze(graph)  # its parameters are then objects of its own
    return refresh(graph)


def _compiled(
    lowered: GraphModule, graph: GraphModule, mode: str, settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph for this process, for all sizes that the program allows."""
    # With wrappers in C++ torch makes no CUDA graphs, and would say so for each program that asks for them.
    tuned = f"{mode}-no-cudagraphs" if settings.get("cpp_wrapper") and mode != "default" else mode
    info = pytree_info(graph.graph)
    flat = copy_graph_module(graph)
    flat.graph.set_codegen(CodeGen())
    flat.recompile()
    traced = info is None or _sizes_vary(graph) or inputs_written(graph.graph)
    signature = call_signature(lowered)
    leaves = pytree.tree_leaves((signature.args, dict(signature.kwargs)))
    if traced:
        _mark_dynamic(lowered, leaves)
    options = torch._inductor.list_mode_options(tuned)
    run = _traced(flat, options, settings) if traced else _straight(flat, leaves, options, settings)
    with _state_kept(graph):
        try:
            run(*leaves)
        except Exception as error:
            if _does_not_compile(error) or _runs(graph, signature):
                raise refused(error) from error
    return called_as_exported(run, graph, None if info is None else info.out_spec)


_SYMBOLS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _sizes_vary(graph: GraphModule) -> bool:
    """Tell whether a program's sizes, or numbers that it computes with, differ from call to call."""
    return any(True for _ in _symbols_in(graph))


def _symbols_in(graph: GraphModule) -> Iterator[Any]:
    """Yield the sizes of a program, and the numbers that it computes with, that are not the same always."""
    values = (value for node in nodes_in(graph) for value in pytree.tree_leaves(value_of(node)))
    for value in values:
        numbers = value.shape if isinstance(value, Tensor) else (value,)
        yield from (number for number in numbers if isinstance(number, _SYMBOLS))


@one_thread_at_a_time
def _straight(
    flat: GraphModule,
    leaves: Sequence[Any],
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile a graph of fixed sizes, in place, without torch.compile: what that looks at on each call takes
    longer than a small model. Compiled code has tensors alone; other arguments and results are known.

    Raises:
        CompilationError: torch cannot compile it.
    """
    for node, leaf in zip(flat.graph.find_nodes(op="placeholder"), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            flat.graph.erase_node(node)
    output = flat.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    places = [place for place, result in enumerate(results) if isinstance(result, Node)]
    output.args = (tuple(results[place] for place in places),)
    flat.recompile()
    results = [None if isinstance(result, Node) else result for result in results]
    try:
        with torch.no_grad(), torch._inductor.config.patch({**options, **settings}):
            given: list[Any] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            run = torch._inductor.compile(flat, given)
    except Exception as error:
        raise refused(error) from error

    def call(*values: Any) -> Any:
        with torch.no_grad():
            found = run(*[value for value in values if isinstance(value, Tensor)])
        if len(found) == len(results):
            return found
        filled = results.copy()
        for place, value in zip(places, found, strict=True):
            filled[place] = value
        return filled

    return call


def _traced(
    flat: GraphModule, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph with torch.compile, on the first call and anew for sizes that its code is not for."""
    # The graph and its parameters are nobody else's: to look at each on every call, a decoder's hundreds,
    # would take a sixth of the time of a token.
    guards = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    run = torch.compile(  # type: ignore[call-overload]  # torch's overloads omit the limit (2.13)
        _calling(flat), options={**options, **guards}, recompile_limit=_VARIANTS
    )
    # Made once: making one takes longer than a call of a small model.
    patched = torch._inductor.config.patch(dict(settings))
    # Without this Dynamo cuts a graph where a size depends on values, and fails on sizes that it has noted.
    captures = dict.fromkeys(_CAPTURES, True) if _sizes_depend_on_values(flat) else {}
    captured = torch._dynamo.config.patch(captures) if captures else nullcontext()

    def call(*values: Any) -> Any:
        # Dynamo asks for freezing when it traces, which may be on any call; options that are given to
        # torch.compile reach only what comes behind it (torch 2.13).
        with torch.no_grad(), patched, captured:
            return run(*values)

    return call


_CAPTURES: Final = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")
_VARIANTS: Final = 64
"""How often a program is compiled at most: three dimensions that are 0, 1 or more take 27, and as many for
tensors of inference mode. Dynamo's own limit is 8, beyond which it runs a program uncompiled.
"""


def _calling(flat: GraphModule) -> Callable[..., Any]:
    """Return a function that calls a program and has a code object of its own.

    Dynamo keeps compiled code by code object, and calls all modules by one. Without guards on modules, a
    program would be given the code of another with inputs of the same sizes.
    """
    for part in flat.modules():  # Dynamo traces no code that waits to be written for the first call
        _ = part.code if isinstance(part, GraphModule) else None

    def whole(*values: Any) -> Any:
        return flat.forward(*values)

    return FunctionType(
        whole.__code__.replace(), whole.__globals__, whole.__name__, None, whole.__closure__
    )


def _sizes_depend_on_values(graph: GraphModule) -> bool:
    return any(map(free_unbacked_symbols, _symbols_in(graph)))


def _mark_dynamic(lowered: GraphModule, leaves: Sequence[Any]) -> None:
    """Tell torch.compile which sizes of the example inputs vary, so that it compiles once for all."""
    inputs = [node for node in lowered.graph.nodes if node.op == "placeholder"]
    for node, leaf in zip(inputs, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        for dimension, size in enumerate(value_of(node).shape):
            if isinstance(size, torch.SymInt):
                torch._dynamo.maybe_mark_dynamic(leaf, dimension)


@contextmanager
def _state_kept(graph: GraphModule) -> Iterator[None]:
    """Undo what a call writes to buffers."""
    undo = undo_writes(get_attribute(graph, path) for path in written_buffers(graph.graph))
    try:
        yield
    finally:
        undo()


def _does_not_compile(error: Exception) -> bool:
    return isinstance(getattr(error, "inner_exception", error), CppCompileError)


def _runs(graph: GraphModule, signature: CallSignature) -> bool:
    """Tell whether a program can run on its example inputs at all: their values mean nothing."""
    try:
        with torch.no_grad():
            graph(*signature.args, **signature.kwargs)
    except Exception:  # whatever operators say to zeros
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _ABOUT_ITSELF:
            warnings.filterwarnings("ignore", message)
        yield


def _keywords(lowered: GraphModule) -> frozenset[str]:
    """Return the names of the arguments that the program was exported with as keywords."""
    info = pytree_info(lowered.graph)
    if info is None or info.in_spec is None:
        return frozenset()
    _, kwargs = pytree.tree_unflatten(range(info.in_spec.num_leaves), info.in_spec)
    return frozenset(kwargs)


_PASSES: Final = "post_grad_custom_post_pass"
_COND: Final = torch.ops.higher_order.cond


class LateReplacement(CustomGraphPass):
    """A graph pass of torch's compiler that replaces late operators, in the order of the graph.

    They stay in a graph until the compiler's own passes are through. Until then a graph is functional: it
    cannot say that an operator overwrites a tensor that nothing reads any more. Behind those passes it can,
    and the order in which tensors are read is known.
    """

    def __init__(self, operators: LateOperators) -> None:
        self._operators = dict(operators)

    def __call__(self, graph: Graph) -> None:
        """Change a graph in place."""
        for node in list(graph.nodes):
            replace = self._operators.get(node.target)
            if replace is not None:
                replace(node)

    def uuid(self) -> Any:
        """Return what tells code that was compiled with these functions from other code."""
        parts = (
            f"{name} {function.__qualname__}\n{inspect.getsource(inspect.getmodule(function) or function)}"
            for name, function in self._operators.items()
        )
        return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


class CondOperandStrides(CustomGraphPass):
    """A graph pass that gives the operands of `cond` the strides for which its branches are compiled.

    torch compiles branches for the strides of example values, and lays out what computes an operand as suits
    that operator (torch 2.13): a branch then reads other elements, without an error in programs whose wrapper
    is C++. It lays out operands of while_loop as needed.
    """

    def __call__(self, graph: Graph) -> None:
        """Change a graph in place."""
        for node in graph.find_nodes(op="call_function", target=_COND):
            with graph.inserting_before(node):
                operands = [_with_its_strides(graph, each) for each in node.args[3]]
            node.args = (*node.args[:3], operands)

    def uuid(self) -> Any:
        """Return what tells code that was compiled with this pass from other code."""
        text = inspect.getsource(type(self)) + inspect.getsource(_with_its_strides)
        return hashlib.sha256(text.encode()).hexdigest()


def _with_its_strides(graph: Graph, operand: Any) -> Any:
    """Return a copy of an operand that lies in memory as its example does, without gaps if that has some."""
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    if not isinstance(value, Tensor) or operand.op in ("placeholder", "get_attr"):
        return operand  # these lie as their examples do
    # A part of what torch lays out otherwise has gaps that the example has not: hence a copy in any case.
    copy = graph.call_function(torch.ops.aten.clone.default, (operand,))
    copy.meta["val"] = value
    if not is_non_overlapping_and_dense_or_false(value):
        copy.kwargs = {"memory_format": torch.contiguous_format}
        copy.meta["val"] = value.contiguous()
    # Only the order of these numbers is looked at.
    strides = numbers(copy.meta["val"].stride())
    result = graph.call_function(force_stride_order, (copy, strides))
    result.meta["val"] = copy.meta["val"]
    return result


def settings_with(
    program: GraphModule, operators: LateOperators, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings of the compiler with the passes that a program needs, after a user's own."""
    passes: list[CustomGraphPass] = [LateReplacement(operators)] if operators else []
    if any(node.target is _COND for node in nodes_in(program)):
        passes.append(CondOperandStrides())
    if not passes:
        return dict(settings)
    users = settings.get(_PASSES, getattr(torch._inductor.config, _PASSES))
    return {**settings, _PASSES: (*get_custom_graph_passes(users), *passes)}
