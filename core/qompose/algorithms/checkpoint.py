# SPDX-License-Identifier: Apache-2.0
"""Weights that were quantized elsewhere: a checkpoint's integers and scales, which nothing rounds again."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm, NotChanged
from qompose.algorithms.packed_layouts import Layout, PackedWeight, layout_of
from qompose.algorithms.products import (
    Operands,
    change_products,
    scales_as_stored,
    set_integers,
    set_scales,
    weight_group,
)
from qompose.errors import CheckpointError, first_of
from qompose.program.disk import INDEX, files_of
from qompose.program.graph import constant_of
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams
from qompose.spec.qparams import SYMMETRIC

_SINGLE = "model.safetensors"
_CONFIGS: Final = (
    ("config.json", None),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
)
"""Files that describe the quantization, the first that is there counts, and whose the last two are."""
_LISTED: Final = 5


@dataclass(frozen=True)
class Checkpoint(Algorithm):
    """Gives weights the integers, scales and zero points that a checkpoint of transformers has for them.

    That is a folder with safetensors files and the configuration of GPTQ ("gptq" and "gptq_v2"), AWQ
    ("gemm") or compressed-tensors ("pack-quantized"), of 2, 4 or 8 bits. Anything else is refused, by name.
    `load_into` fills a float model; conversion then takes the integers from the folder once more::

        checkpoint = Checkpoint("Llama-GPTQ")
        model = LlamaForCausalLM(LlamaConfig.from_pretrained("Llama-GPTQ"))
        checkpoint.load_into(model)
        quantizer.set_filter(checkpoint.holds, make_config(weight_only=True, **checkpoint.options()))

    Conversion needs the folder; what it makes does not.

    Args:
        path: the folder. Its files are read when they are needed.

    Raises:
        CheckpointError: from all methods, if the folder does not have what they need, or in another layout.
    """

    word: ClassVar[str] = "checkpoint"
    path: str = ""

    def __post_init__(self) -> None:
        """Accept a `Path`, and keep what configurations can be saved with."""
        object.__setattr__(self, "path", os.fspath(self.path))

    def __str__(self) -> str:
        return f"{self.word} {Path(self.path).name}"

    @cached_property
    def _layout(self) -> Layout:
        """Return how it stores weights."""
        return layout_of(_quantization_config(Path(self.path)))

    @cached_property
    def _files(self) -> Mapping[str, Path]:
        """Return the file that each tensor is in, by name."""
        return _tensor_files(Path(self.path))

    @cached_property
    def modules(self) -> frozenset[str]:
        """Return the names of the modules whose weights it has as integers."""
        marker = f".{self._layout.needed[0]}"
        found = frozenset(n.removesuffix(marker) for n in self._files if n.endswith(marker))
        if not found:
            raise CheckpointError(f"{self.path} has no tensor whose name ends in {marker!r}")
        return found

    def weight(self, module: str) -> PackedWeight:
        """Return the weight of one of `modules`."""
        names = [f"{module}.{part}" for part in self._layout.parts]
        found = self._read([name for name in names if name in self._files])
        tensors = {name.rpartition(".")[2]: value for name, value in found.items()}
        return self._layout.decode(module, tensors)

    def holds(self, node: Node) -> bool:
        """Tell whether an operator of a program reads a weight that it has: for `set_filter`."""
        return any(
            source.op == "get_attr" and self._module_of(str(source.target)) is not None
            for source in node.all_input_nodes
        )

    def options(self, modules: str = "*", *, group_size: int | None = None) -> dict[str, Any]:
        """Return options for a backend's function that makes configurations, beside `weight_only=True`.

        These are `weight_qmin`, `weight_qmax` and `algorithms`; `group_size` unless a scale is for a row;
        `symmetric=False` where there are zero points; and `scale_dtype` where bfloat16 would round scales.

        Args:
            modules: a pattern for the names of modules, as in a shell.
            group_size: a size that divides those of the checkpoint, whose scales are repeated. None: the
                largest one. Rows with zero points need one as well.

        Raises:
            CheckpointError: the pattern matches nothing, or the size does not divide a group.
        """
        chosen = sorted(name for name in self.modules if fnmatchcase(name, modules))
        if not chosen:
            raise CheckpointError(f"{modules!r} matches no weight of {self.path}", (modules,))
        needs = [_Needs.of(self.weight(name)) for name in chosen]
        has_zero_points = any(need.zero_points for need in needs)
        largest = math.gcd(*(need.group_size for need in needs))
        if group_size is not None and (group_size < 1 or largest % group_size):
            raise CheckpointError(
                f"group_size={group_size} must be a positive divisor of {largest}, the greatest "
                f"common divisor of the group sizes in {self.path}",
                chosen,
            )
        plain = all(need.by_row for need in needs) and not has_zero_points
        size = group_size or (None if plain else largest)
        wide = size is not None and any(need.wide for need in needs)
        return {
            "weight_qmin": -(2 ** (self._layout.bits - 1)),
            "weight_qmax": 2 ** (self._layout.bits - 1) - 1,
            **({} if size is None else {"group_size": size}),
            **({"symmetric": False} if has_zero_points else {}),
            **({"scale_dtype": torch.float32} if wide else {}),
            "algorithms": (self,),
        }

    def load_into(self, model: nn.Module, *, ignore: Sequence[str] = ()) -> None:
        """Fill all parameters and persistent buffers of a float model, or raise and change none.

        Weights get what their integers stand for, in the type that they have. A tensor that the model shares,
        such as a tied head, may be there once. Biases of zeros that the model does not have are left out.

        Args:
            ignore: patterns, as in a shell, of tensors that the model does not need.

        Raises:
            CheckpointError: a tensor has no place in the model, or another shape; integers are not of an
                `nn.Linear`; the model needs a tensor that is not there, or is on the meta device; or a
                pattern matches nothing.
        """
        plan = _Plan(self, model, self._ignored(ignore))
        plan.check()
        with torch.no_grad():
            for name, value in plan.values():
                plan.state[name].copy_(value)

    def correct(self, found: Calibrated) -> None:
        """Give weights their integers, scales and zero points.

        Raises:
            CheckpointError: one is not in the checkpoint, is another in the program, or does not fit its
                configuration as it is.
        """
        if not any(map(self.is_asked, found.plan.claims)):
            return
        taken = set[str]()

        def change(product: Operands, claim: Claim) -> str:
            module = self._module_of(str(product.weight.target))
            if module is None:
                raise CheckpointError(
                    f"{product.weight.target} has no integers in {self.path}: leave it in float or give it "
                    "another configuration, with set_filter(checkpoint.holds, config)",
                    (str(product.weight.target),),
                )
            taken.add(module)
            return _take(found, product, module, self.weight(module))

        change_products(found, self, change)
        found.refused.extend(self._left(found, taken))

    def _left(self, found: Calibrated, taken: set[str]) -> Iterator[str]:
        """Yield a line if weights of the program are in the checkpoint and were not taken from it."""
        reads = (str(n.target) for n in found.nodes.values() if n.op == "get_attr")
        modules = {self._module_of(target) for target in reads} - taken - {None}
        if modules:
            yield (
                f"{self.word} was not applied to {first_of(sorted(map(str, modules)), _LISTED)}: "
                "no configuration that applies there requests it"
            )

    def _module_of(self, target: str) -> str | None:
        """Return the module whose weight a parameter of a program is, None if there is none.

        A program of a module around the model has longer names.
        """
        path, _, last = target.rpartition(".")
        while path and last == "weight":
            if path in self.modules:
                return path
            path = path.partition(".")[2]
        return None

    def _ignored(self, patterns: Sequence[str]) -> frozenset[str]:
        matched = {p: {n for n in self._files if fnmatchcase(n, p)} for p in patterns}
        if idle := [pattern for pattern, names in matched.items() if not names]:
            raise CheckpointError(f"ignore={idle} matches no tensor of {self.path}", idle)
        return frozenset().union(*matched.values())

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for path in dict.fromkeys(self._files[name] for name in names):
            with _opened(path) as file:
                found |= {n: file.get_tensor(n) for n in names if self._files[n] == path}
        return found


class _Needs(NamedTuple):
    """What a configuration has to offer for a weight; `wide` says that bfloat16 would round its scales."""

    group_size: int
    by_row: bool
    zero_points: bool
    wide: bool

    @classmethod
    def of(cls, weight: PackedWeight) -> _Needs:
        wide = not torch.equal(weight.scale.bfloat16().float(), weight.scale)
        by_row = weight.scale.shape[1] == 1
        return cls(weight.group_size, by_row, bool(weight.zero_point.any()), wide)


@dataclass(frozen=True)
class _Plan:
    """Which tensors of a checkpoint go where in the state of a model."""

    checkpoint: Checkpoint
    model: nn.Module
    ignored: frozenset[str]

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers of the model, by all their names."""
        return self.model.state_dict(keep_vars=True)

    @cached_property
    def modules(self) -> list[str]:
        """Return the modules whose weights have a place in the model."""
        marker = self.checkpoint._layout.needed[0]
        return sorted(m for m in self.checkpoint.modules if f"{m}.{marker}" not in self.ignored)

    @cached_property
    def floats(self) -> list[str]:
        """Return the tensors that are stored as they are."""
        layout, modules = self.checkpoint._layout, self.checkpoint.modules
        left_out = {f"{m}.{part}" for m in modules for part in layout.parts} | self.ignored
        names = sorted(name for name in self.checkpoint._files if name not in left_out)
        return [name for name in names if not self._adds_nothing(name)]

    def _adds_nothing(self, name: str) -> bool:
        """Tell whether a tensor is a bias of zeros that the model's linear does not have."""
        module, _, part = name.rpartition(".")
        extra = part == "bias" and name not in self.state and module in self.checkpoint.modules
        return extra and not bool(self.checkpoint._read([name])[name].any())

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, by the names that they have in the model, one at a time."""
        for module in self.modules:
            yield f"{module}.weight", self.checkpoint.weight(module).values()
        for name in self.floats:
            yield name, self.checkpoint._read([name])[name]

    def _shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Yield the shapes of all tensors, each of which can be read."""
        for module in self.modules:
            yield f"{module}.weight", self.checkpoint.weight(module).integers.shape
        for name in self.floats:
            yield name, self.checkpoint._read([name])[name].shape

    def check(self) -> None:
        """Read everything once, so that nothing is wrong when the first tensor is written."""
        shapes = dict(self._shapes())
        filled = {_identity(self.state[name]) for name in shapes if name in self.state}
        self._refuse("has no place in the model for", set(shapes) - set(self.state))
        lacking = {n for n, value in self.state.items() if _identity(value) not in filled}
        self._refuse("does not have", lacking)
        other = {name for name, shape in shapes.items() if self.state[name].shape != shape}
        self._refuse("has other shapes than the model of", other)
        linears = {
            n
            for n, module in self.model.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Linear)
        }
        self._refuse("has, of what is no nn.Linear,", set(self.modules) - linears)
        self._refuse("has several values for what the model has once:", self._several(shapes))
        meta = {name for name in shapes if self.state[name].is_meta}
        self._refuse("cannot fill, because they are on the meta device (model.to_empty),", meta)

    def _several(self, names: Iterable[str]) -> set[str]:
        """Return names of one tensor of the model, such as a tied head, that have different values."""
        by_tensor: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            by_tensor[_identity(self.state[name])].append(name)
        shared = {name for names in by_tensor.values() if len(names) > 1 for name in names}
        first = dict[Any, Tensor]()
        return {
            name
            for name, value in (self.values() if shared else ())
            if name in shared
            and not torch.equal(first.setdefault(_identity(self.state[name]), value), value)
        }

    def _refuse(self, what: str, names: set[str]) -> None:
        if names:
            listed = sorted(names)
            raise CheckpointError(
                f"{self.checkpoint.path} {what} {first_of(listed, _LISTED)}", listed
            )


def _identity(value: Tensor) -> tuple[Any, ...]:
    """Return what two names of one tensor share."""
    if value.is_meta or not value.numel():
        return (id(value),)
    return (value.data_ptr(), value.shape, value.stride())


def _take(found: Calibrated, product: Operands, module: str, weight: PackedWeight) -> str:
    """Give a product the weight of a checkpoint, and say so.

    Raises:
        CheckpointError: the configuration or the program cannot hold it as it is.
    """
    try:
        number, q = weight_group(found, product)
        symmetric = getattr(found.plan.groups[number].spec, "qscheme", None) in SYMMETRIC
        stored = scales_as_stored(found, number)
        for reason in _objections(weight, q, stored, symmetric=symmetric):
            raise NotChanged(reason)
        _check_values(found, product, weight)
        set_scales(found, product, _spread(weight.scale, q), _spread(weight.zero_point, q))
        set_integers(found, product, weight.integers.to(q.scale.device))
    except NotChanged as reason:
        raise CheckpointError(f"{module} cannot keep its integers: {reason}", (module,)) from None
    return f"{weight.bits} bits of {module} as they are"


def _objections(
    weight: PackedWeight, q: QParams, stored: torch.dtype | None, *, symmetric: bool
) -> Iterator[str]:
    """Yield why a configuration cannot hold a weight, and what to ask for instead."""
    low, high, groups = -(2 ** (weight.bits - 1)), 2 ** (weight.bits - 1) - 1, weight.scale.shape[1]
    if q.dtype is not torch.int8 or q.low > low or q.high < high:
        yield (
            f"they have {weight.bits} bits, and the configuration stores {q.dtype} in [{q.low}, {q.high}]; "
            f"use weight_qmin={low}, weight_qmax={high}"
        )
    outputs = len(weight.scale)
    if groups > 1 and not q.blocks:
        yield f"they are in groups; use group_size={weight.group_size}"
    elif q.per_tensor or q.scale.shape[0] != outputs or (q.blocks and q.scale.shape[1] % groups):
        yield (
            f"a scale is for {weight.group_size} inputs of one output, and the configuration has scales of "
            f"shape {[*q.scale.shape]}; use a group_size that divides {weight.group_size}"
        )
    if symmetric and bool(weight.zero_point.any()):
        yield "they have zero points; use symmetric=False, or a backend that offers it"
    narrowed = weight.scale if stored is None else weight.scale.to(stored).float()
    if not torch.equal(narrowed, weight.scale):
        yield (
            f"the configuration rounds scales to {stored}; use scale_dtype=torch.float32, or a backend that "
            "offers it"
        )


def _spread(values: Tensor, q: QParams) -> Tensor:
    """Return a number for each group in the shape of a configuration, whose groups may be smaller."""
    values = values.to(q.scale.device)
    if not q.blocks:
        return values[:, 0].contiguous()
    return values.repeat_interleave(q.scale.shape[1] // values.shape[1], 1)


def _check_values(found: Calibrated, product: Operands, weight: PackedWeight) -> None:
    """Check that a program has the weight that integers stand for, not one that they would replace."""
    actual, parameter = found.factors.constant(product.weight.name), constant_of(product.weight)
    assert parameter is not None
    expected = weight.values().to(parameter.device, parameter.dtype).to(actual.dtype)
    if not torch.equal(expected, actual):
        raise NotChanged(
            "the program has another weight there; call load_into(model) before the export, and request no "
            "algorithm that changes weights"
        )


def _quantization_config(folder: Path) -> Mapping[str, Any]:
    """Return what the folder says about its quantization."""
    for name, method in _CONFIGS:
        if (folder / name).is_file():
            config = _json_object(folder / name)
            if method is not None:
                return {"quant_method": method, **config}
            found = config.get("quantization_config") or config.get("compression_config")
            if isinstance(found, Mapping):
                return found
    raise CheckpointError(
        f"{folder} has no quantization_config in config.json, and neither quantize_config.json nor "
        "quant_config.json, so it is not a folder of quantized weights"
    )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by name."""
    single = folder / _SINGLE
    try:
        files = files_of(folder if (folder / INDEX).is_file() or not single.is_file() else single)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    found = dict[str, Path]()
    for path in files:
        with _opened(path) as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except CheckpointError:
        raise
    except Exception as error:  # what is no safetensors file, or is cut short
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _json_object(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds no JSON object")
    return found
