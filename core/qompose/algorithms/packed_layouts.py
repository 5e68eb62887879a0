# SPDX-License-Identifier: Apache-2.0
"""Weights of few bits as checkpoints store them: the layouts of GPTQ, AWQ and compressed-tensors.

Of a linear, `(out, in)`, each stores integers of `b` bits in words of 32, the first in the lowest bits, and
a scale for each group of inputs:

| layout | integers | packed along | zero points |
|---|---|---|---|
| GPTQ | `qweight (in b / 32, out)` | inputs | `qzeros (groups, out b / 32)`, less 1 but in "gptq_v2" |
| AWQ | `qweight (in, out / 8)` | outputs, even ones first | `qzeros (groups, out / 8)`, in that order |
| compressed-tensors | `weight_packed (out, in b / 32)` | inputs | `weight_zero_point (out b / 32, groups)` |

All are unsigned. Here they are signed, with zero points around 0: less `2 ** (b - 1)`, both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from qompose.errors import CheckpointError

Tensors: TypeAlias = Mapping[str, Tensor]
"""The tensors of one module, by what follows its name."""

_WORD: Final = 32
_BITS: Final = (2, 4, 8)
_GPTQ_TENSORS: Final = ("qweight", "qzeros", "scales")
_COMPRESSED_TENSORS: Final = ("weight_packed", "weight_scale", "weight_shape")
_INTERLEAVED: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""By output channel, the field of AWQ's word that it is in."""


class _NotReadable(Exception):  # noqa: N818 - a reason, which the caller gives a name
    """Raised with what is wrong with a module's tensors."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight that was quantized elsewhere, as its checkpoint says: `(integers - zero_point) * scale`.

    Attributes:
        integers: int8 `(out, in)`, of `bits` bits.
        scale: float32 `(out, groups)`, each of as many inputs.
        zero_point: int64 `(out, groups)`.
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor
    bits: int

    @property
    def group_size(self) -> int:
        """Return how many inputs share a scale."""
        return self.integers.shape[1] // self.scale.shape[1]

    def values(self) -> Tensor:
        """Return what the integers stand for, float32 `(out, in)`."""
        grouped = self.integers.view(*self.scale.shape, -1).float()
        grouped.sub_(self.zero_point[..., None].float()).mul_(self.scale[..., None])
        return grouped.flatten(1)


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores its weights.

    Attributes:
        name: of the layout.
        bits: of an integer.
        needed, optional: what follows the name of a module in the names of its tensors. The first has the
            integers, so that a module with such a tensor is quantized.
    """

    name: str
    bits: int
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    _decode: Callable[[Tensors], PackedWeight]

    @property
    def parts(self) -> tuple[str, ...]:
        """Return what follows the name of a module in the names of all tensors of a weight."""
        return (*self.needed, *self.optional)

    def decode(self, module: str, tensors: Tensors) -> PackedWeight:
        """Return the weight of a module.

        Raises:
            CheckpointError: tensors are missing, of other types or shapes than the layout has, or hold
                what no group of consecutive inputs can say.
        """
        try:
            if missing := [part for part in self.needed if part not in tensors]:
                raise _NotReadable(f"it has no {', '.join(missing)}")
            return self._decode(tensors)
        except _NotReadable as reason:
            raise CheckpointError(
                f"{module} cannot be read in the {self.name} layout: {reason}", (module,)
            ) from None


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return the layout that a checkpoint's `quantization_config` describes.

    Raises:
        CheckpointError: it is another one, or weights are not all that it quantizes.
    """
    method = config.get("quant_method")
    makers = {"gptq": _gptq_layout, "awq": _awq_layout, "compressed-tensors": _compressed_layout}
    if method not in makers:
        raise CheckpointError(
            f"quant_method is {method!r}; weights can be loaded from {', '.join(makers)}"
        )
    try:
        return makers[method](config)
    except _NotReadable as reason:
        raise CheckpointError(f"this {method} checkpoint cannot be loaded: {reason}") from None


def _gptq_layout(config: Mapping[str, Any]) -> Layout:
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        form = "marlin" if config.get("is_marlin_format") else form
        raise _NotReadable(
            f"its format is {form!r}, not 'gptq' or 'gptq_v2'; save it as one of these"
        )
    _refuse_set(config, "dynamic", "rotation")
    bits, size = _bits(config.get("bits")), _group_size(config.get("group_size", -1))
    decode = partial(
        _decode_gptq, bits=bits, size=size, less=form == "gptq", symmetric=config.get("sym") is True
    )
    ordered = bool(config.get("desc_act")) and size is not None
    needed, optional = _split({"g_idx": ordered})
    return Layout(f"{form} {bits}-bit", bits, (*_GPTQ_TENSORS, *needed), optional, decode)


def _awq_layout(config: Mapping[str, Any]) -> Layout:
    version = config.get("version") or config.get("checkpoint_format") or config.get("format")
    if str(version or "gemm").lower() != "gemm":
        raise _NotReadable(f"its version is {version!r}, not 'gemm'; save it as 'gemm'")
    if config.get("zero_point", True) is not True:
        raise _NotReadable(f"its zero_point is {config['zero_point']!r}, but gemm requires true")
    bits = _bits(config.get("bits", config.get("w_bit")))
    if bits != 4:
        raise _NotReadable(f"it has {bits} bits; AWQ's order of fields is known only for 4 bits")
    size = _group_size(config.get("group_size", config.get("q_group_size", -1)))
    decode = partial(_decode_awq, size=size)
    return Layout("awq gemm 4-bit", 4, _GPTQ_TENSORS, (), decode)


def _compressed_layout(config: Mapping[str, Any]) -> Layout:
    _refuse_set(config, "kv_cache_scheme", "sparsity_config", "transform_config")
    groups = list(_mapping(config.get("config_groups"), "config_groups").values())
    found = {_compressed_bits(_mapping(group, "config_groups entry"), config) for group in groups}
    if len(found) != 1:
        raise _NotReadable(f"its config_groups differ in bits: {sorted(found)}; all must be equal")
    (bits,) = found
    weights = [group["weights"] for group in groups]
    sizes = frozenset(map(_compressed_size, weights))
    name = f"compressed-tensors {bits}-bit"
    shared = any(one.get("strategy") == "tensor" for one in weights)
    decode = partial(_decode_compressed, bits=bits, sizes=sizes, shared=shared)
    needed, optional = _split(
        {
            "weight_zero_point": all(one.get("symmetric") is False for one in weights),
            "weight_g_idx": all(one.get("actorder") == "group" for one in weights),
        }
    )
    return Layout(name, bits, (*_COMPRESSED_TENSORS, *needed), optional, decode)


def _compressed_bits(group: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the bits of a group of modules whose weights alone are quantized to packed integers."""
    form = group.get("format") or config.get("format")
    if form != "pack-quantized":
        raise _NotReadable(f"its format is {form!r}, not 'pack-quantized'")
    _refuse_set(group, "input_activations", "output_activations")
    weights = _mapping(group.get("weights"), "weights")
    if (kind := weights.get("type", "int")) != "int" or weights.get("dynamic"):
        raise _NotReadable(f"weights are {'dynamic' if kind == 'int' else kind}, not static int")
    if weights.get("strategy") not in (None, "tensor", "channel", "group"):
        raise _NotReadable(f"its strategy is {weights['strategy']!r}, not tensor, channel or group")
    return _bits(weights.get("num_bits"))


def _compressed_size(weights: Mapping[str, Any]) -> int | None:
    """Return the inputs of a group, None where a scale is for a row or for all of them."""
    if weights.get("strategy") in ("tensor", "channel") or weights.get("group_size") is None:
        return None
    return _group_size(weights["group_size"])


def _split(required: Mapping[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tensors without which a weight would be read wrongly, and the others."""
    needed = tuple(name for name, needs in required.items() if needs)
    return needed, tuple(name for name in required if name not in needed)


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise _NotReadable(f"its {name} must be a non-empty JSON object, got {value!r}")
    return value


def _refuse_set(config: Mapping[str, Any], *names: str) -> None:
    """Refuse what a checkpoint says about more than its weights, or differently of some."""
    if found := [name for name in names if config.get(name)]:
        raise _NotReadable(f"it sets {', '.join(found)}, which packed weights cannot express")


def _bits(value: object) -> int:
    if type(value) is not int or value not in _BITS:
        raise _NotReadable(f"it has {value!r} bits, not one of {', '.join(map(str, _BITS))}")
    return value


def _group_size(value: object) -> int | None:
    """Return the inputs of a group, None where a row is one."""
    if type(value) is not int or not (value > 0 or value == -1):
        raise _NotReadable(f"its group_size is {value!r}, not -1 or a positive integer")
    return None if value == -1 else value


def _decode_gptq(
    tensors: Tensors, *, bits: int, size: int | None, less: bool, symmetric: bool
) -> PackedWeight:
    integers, zeros = _fields(tensors, "qweight", bits, 0), _fields(tensors, "qzeros", bits, 1)
    if less and bool((zeros == 2**bits - 1).any()):
        raise _NotReadable(
            f"qzeros has fields equal to {2**bits - 1}, which some runtimes read as zero point 0 "
            f"and others as {2**bits}; save it as 'gptq_v2'"
        )
    zeros = zeros.long() + int(less)
    if symmetric and bool((zeros != 2 ** (bits - 1)).any()):
        raise _NotReadable(
            f"by sym=true zero points are {2 ** (bits - 1)}, and qzeros hold others; set checkpoint_format "
            "to 'gptq' if they are stored less 1, to 'gptq_v2' if not, or sym=false if they vary"
        )
    return _weight(
        integers.t(), _scales(tensors, "scales").t(), zeros.t(), bits, size, tensors.get("g_idx")
    )


def _decode_awq(tensors: Tensors, *, size: int | None) -> PackedWeight:
    integers, zeros = (_fields(tensors, n, 4, 1, _INTERLEAVED) for n in ("qweight", "qzeros"))
    return _weight(integers.t(), _scales(tensors, "scales").t(), zeros.t(), 4, size)


def _decode_compressed(
    tensors: Tensors, *, bits: int, sizes: frozenset[int | None], shared: bool
) -> PackedWeight:
    outputs, inputs = _shape(tensors, "weight_shape")
    packed = _fields(tensors, "weight_packed", bits, 1)
    if outputs != len(packed) or not 0 <= packed.shape[1] - inputs < _WORD:
        raise _NotReadable(
            f"weight_shape is {[outputs, inputs]}, but weight_packed holds {[*packed.shape]}"
        )
    integers, scale = packed[:, :inputs], _scales(tensors, "weight_scale")
    scale = scale if scale.dim() == 2 else scale.reshape(-1, 1)
    scale = scale.expand(outputs, -1) if shared and scale.numel() == 1 else scale
    zeros = torch.full(scale.shape, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zeros = _fields(tensors, "weight_zero_point", bits, 0)[:outputs]
    size = inputs // max(scale.shape[1], 1)
    if size not in sizes and not (scale.shape[1] == 1 and None in sizes):
        said = sorted("all" if one is None else f"each {one}" for one in sizes)
        raise _NotReadable(
            f"scales have the shape {[*scale.shape]}, and config_groups say one for {' or '.join(said)} of "
            f"{inputs} inputs"
        )
    return _weight(integers, scale, zeros, bits, size, tensors.get("weight_g_idx"))


def _shape(tensors: Tensors, name: str) -> tuple[int, int]:
    """Return the two sizes that a tensor of integers holds."""
    given = tensors[name]
    if given.dtype not in (torch.int32, torch.int64) or given.numel() != 2:
        raise _NotReadable(f"{name} must hold two integers, got {given.dtype} {[*given.shape]}")
    outputs, inputs = given.flatten().tolist()
    return outputs, inputs


def _fields(
    tensors: Tensors, name: str, bits: int, dim: int, places: Sequence[int] | None = None
) -> Tensor:
    """Return the unsigned fields of a tensor's words, uint8, one after another along a dimension.

    Args:
        places: which field is to come first, second, ... of each word.
    """
    words = tensors[name]
    if words.dtype is not torch.int32 or words.dim() != 2:
        raise _NotReadable(
            f"{name} must be a two-dimensional int32 tensor, got {words.dtype} {[*words.shape]}"
        )
    mask = 2**bits - 1
    order = range(_WORD // bits) if places is None else places
    fields = [(words >> bits * place & mask).to(torch.uint8) for place in order]
    return torch.stack(fields, dim + 1).flatten(dim, dim + 1)


def _scales(tensors: Tensors, name: str) -> Tensor:
    """Return scales as float32, which holds those of all float types that layouts have."""
    scale = tensors[name]
    if not scale.is_floating_point() or scale.dtype is torch.float64 or scale.dim() > 2:
        raise _NotReadable(f"{name} is {scale.dtype} {[*scale.shape]}")
    scale = scale.float()
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise _NotReadable(f"{name} has values that are not positive and finite")
    return scale


def _weight(
    integers: Tensor,
    scale: Tensor,
    zeros: Tensor,
    bits: int,
    size: int | None,
    group_of_input: Tensor | None = None,
) -> PackedWeight:
    """Return a weight of unsigned integers `(out, in)`, with scales and zero points `(out, groups)`."""
    outputs, inputs = integers.shape
    size = inputs if size is None else size
    if inputs == 0 or inputs % size or scale.shape != (outputs, inputs // size):
        raise _NotReadable(
            f"scales have the shape {[*scale.shape]} (outputs, groups), which does not match "
            f"integers of shape {[*integers.shape]} in groups of {size}"
        )
    if zeros.shape != scale.shape:
        raise _NotReadable(
            f"zero points have the shape {[*zeros.shape]} (outputs, groups), and scales {[*scale.shape]}"
        )
    if group_of_input is not None:
        order = _order_of_groups(group_of_input, size, scale.shape[1])
        scale, zeros = scale[:, order], zeros[:, order]
    middle = 2 ** (bits - 1)
    return PackedWeight(
        (integers.contiguous() - middle).view(torch.int8),  # modulo 256, so that the sign is right
        scale.contiguous(),
        (zeros.long() - middle).contiguous(),
        bits,
    )


def _order_of_groups(group_of_input: Tensor, size: int, groups: int) -> Tensor:
    """Return which group each `size` inputs belong to.

    Raises:
        _NotReadable: they do not all belong to one, so inputs would have to be permuted at run time.
    """
    given = group_of_input.flatten()
    wrong = given.is_floating_point() or len(given) != size * groups
    if wrong or bool(((given < 0) | (given >= groups)).any()):
        raise _NotReadable(
            f"g_idx must name one of {groups} groups for each of {size * groups} inputs"
        )
    blocks = given.long().view(groups, size)
    if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
        raise _NotReadable(
            "g_idx scatters the inputs of a group (desc_act or actorder='group'), and kernels read groups "
            "of consecutive inputs; quantize with desc_act=False, static groups or actorder='weight'"
        )
    return blocks[:, 0]
