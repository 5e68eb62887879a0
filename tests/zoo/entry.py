# SPDX-License-Identifier: Apache-2.0
"""What one model of the zoo is, and how its weights and inputs are drawn."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

LARGEST_BATCH = 64

_TORCHS_OWN_WARNINGS = (
    "The tensor attributes .*_flat_weights",  # recurrent modules list views of their weights
    "The .grad attribute of a Tensor that is not a leaf",  # operands of branches and loops
    "`torch.jit.script_method` is deprecated",  # what `scan` imports
)
"""What `torch.export.export` of torch 2.13 warns about, whatever the model does."""

Draw = Callable[[Generator], Any]
"""Makes one argument: a tensor, or tensors in tuples and dictionaries."""


class Inputs(Protocol):
    """Draws the arguments of a call."""

    def __call__(self, draw: int = 0) -> tuple[Any, ...]:
        """Arguments of the same shapes for every number, of other values for another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooModel:
    """A small architecture that exports in eval mode.

    `build()` gives a new module in eval mode, `inputs()` new arguments for it. Both depend on
    `name` alone, the arguments on the number of the draw too: two calls give equal weights and
    equal values. The caller's random state is left as it was. `dynamic_shapes` is what
    `torch.export.export` takes, or `None`.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    tags: frozenset[str]
    dynamic_shapes: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        return self.name

    def export(self, *, dynamic: bool = False) -> torch.export.ExportedProgram:
        """The exported program; `dynamic` asks for the dynamic shapes, where there are any.

        One export serves all callers of a process: it takes longer than what most tests do with it.
        A program whose weights or graph somebody changed is exported anew. Modules made of one
        program share its tensors, so whoever runs one that writes to its state asks `fresh_export`.
        """
        shapes = self.dynamic_shapes if dynamic else None
        key = (self.build, shapes is not None, torch.is_grad_enabled())
        program, state = _EXPORTS.pop(key, (None, None))
        if program is None or _state(program) != state:
            program = self.fresh_export(dynamic=dynamic)
        _EXPORTS[key] = program, _state(program)
        if len(_EXPORTS) > _KEPT:
            del _EXPORTS[next(iter(_EXPORTS))]
        return program

    def fresh_export(self, *, dynamic: bool = False) -> torch.export.ExportedProgram:
        """The exported program, with tensors of its own."""
        shapes = self.dynamic_shapes if dynamic else None
        with warnings.catch_warnings():
            for message in _TORCHS_OWN_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            return torch.export.export(self.build(), self.inputs(), dynamic_shapes=shapes)


_EXPORTS: dict[tuple[object, bool, bool], tuple[torch.export.ExportedProgram, object]] = {}
"""Programs, the last used last, by the function that builds their model: networks have sizes, not names."""
_KEPT = 300


def _state(program: torch.export.ExportedProgram) -> object:
    """What differs once somebody has changed a program: its graph, or the values of its tensors."""
    tensors = {**program.state_dict, **program.constants}
    versions = [(k, id(t), t._version) for k, t in tensors.items() if isinstance(t, Tensor)]
    metas = [(node.name, str(node.target), len(node.meta)) for node in program.graph.nodes]
    return versions, metas, program.graph_module.meta.keys()


def zoo_model(
    name: str,
    make: Callable[[], nn.Module],
    *draws: Draw,
    tags: Iterable[str] = (),
    dynamic: bool = True,
) -> ZooModel:
    """A `ZooModel` whose module is `make()` and whose arguments are drawn by `draws`.

    `dynamic` declares dimension 0 of every tensor that has one as one dynamic batch dimension.
    """
    seed = zlib.crc32(name.encode())
    return ZooModel(
        name=name,
        build=lambda: _build(make, seed),
        inputs=lambda draw=0: _draw(draws, seed + draw),
        tags=frozenset(tags),
        dynamic_shapes=_batch_first(_draw(draws, seed)) if dynamic else None,
    )


def net(**parts: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[[], nn.Module]]:
    """Make of a `forward` what makes its models: its first argument is one, with what `parts` make."""

    def made_of(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
        kind = type(forward.__name__, (nn.Module,), {"forward": forward})

        def make() -> nn.Module:
            model: nn.Module = kind()
            for name, part in parts.items():
                setattr(model, name, part())
            return model

        return make

    return made_of


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Draw:
    """Normally distributed values."""
    return lambda generator: torch.randn(shape, generator=generator).to(dtype)


def ids(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Draw:
    """Integers in `[0, high)`."""
    return lambda generator: torch.randint(high, shape, generator=generator).to(dtype)


def keep_mask(*shape: int, dtype: torch.dtype = torch.bool) -> Draw:
    """1 for kept positions; the last dimension keeps a prefix of at least one and not all."""

    def draw(generator: Generator) -> Tensor:
        length = torch.randint(1, shape[-1], (*shape[:-1], 1), generator=generator)
        return (torch.arange(shape[-1]) < length).to(dtype)

    return draw


def group(*draws: Draw) -> Draw:
    """A tuple of what `draws` make."""
    return lambda generator: tuple(draw(generator) for draw in draws)


def mapping(**draws: Draw) -> Draw:
    """A dictionary of what `draws` make."""
    return lambda generator: {name: draw(generator) for name, draw in draws.items()}


def _batch_first(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `dynamic_shapes` takes for these arguments, all of one batch."""
    batch = torch.export.Dim("batch", min=2, max=LARGEST_BATCH)
    return pytree.tree_map(lambda tensor: {0: batch} if tensor.dim() else None, arguments)


def _draw(draws: tuple[Draw, ...], seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(draw(generator) for draw in draws)


def _build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = make()
        for part in module.modules():
            _age(part)
    return module.eval()


def _age(part: nn.Module) -> None:
    """Statistics and affine parameters as training leaves them.

    At their initial values a normalisation is nearly the identity, and a wrong fold goes unseen.
    """
    if isinstance(part, _BatchNorm) and part.running_mean is not None:
        part.running_mean.normal_(0.0, 0.3)
        part.running_var.uniform_(0.5, 2.0)
    norms = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    if isinstance(part, norms) and part.weight is not None:
        part.weight.uniform_(0.5, 1.5)
        if getattr(part, "bias", None) is not None:
            part.bias.normal_(0.0, 0.2)
