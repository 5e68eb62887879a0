# SPDX-License-Identifier: Apache-2.0
"""The observer interface, with the observers that estimate a range by least and largest values.

Observers are modules that pass a tensor through unchanged. Each declares dtype, integer bounds and scheme,
and gives `calculate_qparams()`. One that saw nothing says so by `calibrated`. Mask values never widen a
range (`value_screening`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from qompose.errors import ConfigError, QomposeWarning, StatisticsError, UncalibratedError
from qompose.observers.tensor_statistics import Channels, Facts
from qompose.observers.value_screening import Cleaned, Screen, slice_extremes
from qompose.spec.qdq import in_rows
from qompose.spec.qparams import (
    CASTS,
    DEFAULT_EPS,
    FLOAT_ZERO_POINT,
    PER_CHANNEL,
    choose_qparams,
    full_blocks,
    in_blocks,
    quantized_range,
    stored_in,
)
from qompose.spec.quantization_spec import (
    OBSERVERS,
    ObserverFactory,
    register_virtual_subclasses,
    virtual_subclass_of,
)


@virtual_subclass_of(OBSERVERS, "ObserverBase")
class ObserverBase(nn.Module):
    """What an observer written from nothing derives from: a module with `forward` and `calculate_qparams`.

    `forward` takes a tensor of any shape, looks at it, and returns it; `calculate_qparams` returns scale
    and zero point, of shape `()`, or `(C,)` per channel. One that replaces its own node has a method
    `convert(program, node)`.

    Args:
        dtype: of the integers.
        is_dynamic: whether parameters are computed at run time.
    """

    def __init__(self, dtype: torch.dtype, is_dynamic: bool = False) -> None:
        super().__init__()
        register_virtual_subclasses()
        self.dtype, self.is_dynamic = dtype, is_dynamic

    @classmethod
    def with_args(cls, **arguments: Any) -> ObserverFactory:
        """Return a factory that makes this observer with `arguments`."""
        return ObserverFactory(cls, tuple(arguments.items()))


class Observer(ObserverBase):
    """Base of all observers: what is quantized, how far the statistics are, and the parameters they give.

    `quant_min` and `quant_max` are the bounds that its parameters are for, None for a cast to float; `eps` is
    the least scale, in units of the tensor.

    Raises:
        ConfigError: the bounds do not fit the dtype, or the scheme is not one this observer estimates.
    """

    per_channel = False
    looks = True
    """Whether it keeps statistics, and so has to know the scheme."""
    estimates = True
    """Whether its parameters come from what it has seen."""
    mergeable = False
    """Whether its statistics do not depend on the order of batches, so that parts can be put together."""
    constant = False
    """Set by prepare on observers of parameters: a value is looked at again only after it changed."""
    shared = False
    """Set by prepare on observers of several values, some of which may be views of others."""
    subject = "the observed tensor"
    """Set by prepare: which tensor is observed, for messages."""
    ends: tuple[Tensor, Tensor] | None = None
    """The least and the largest value of the tensor that is coming, where somebody has looked already."""

    def __init__(
        self,
        dtype: torch.dtype = torch.uint8,
        qscheme: torch.qscheme | None = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = DEFAULT_EPS,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(dtype, is_dynamic)
        self.eps = eps
        default = torch.per_channel_affine if self.per_channel else torch.per_tensor_affine
        self.qscheme = default if qscheme is None else qscheme
        self._asked = quant_min, quant_max
        self.quant_min, self.quant_max = quant_min, quant_max
        if dtype not in CASTS:
            self.quant_min, self.quant_max = quantized_range(dtype, quant_min, quant_max)
        if self.looks and (self.qscheme in PER_CHANNEL) != self.per_channel:
            raise ConfigError(f"{type(self).__name__} does not support qscheme {self.qscheme}")
        self.screen = Screen()
        self.set_range: tuple[float, float] | None = None
        self._seen: tuple[int, object] | None = None
        self._last = LastSeen()

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x`, of any shape, and return it unchanged."""
        if self.shared and self._last.again(x.detach()):
            self._see_again(x.detach())
            return x
        stamp = (x.data_ptr(), version_of(x)) if self.constant else None
        if x.numel() and (stamp is None or stamp != self._seen):
            self._seen = stamp
            self.observe(x.detach())
        return x

    def observe(self, x: Tensor) -> None:
        """Update the statistics with a tensor of any shape that has at least one element."""
        raise NotImplementedError

    def _see_again(self, x: Tensor) -> None:
        """Look at a view of the values that were observed last; they do not count again."""

    def observe_together(self, x: Tensor) -> None:
        """Update the statistics with the tensors of all processes that train together, alike in each."""
        raise ConfigError(
            f"{type(self).__name__} of {self.subject} cannot merge ranges across processes. "
            'Train in one process, or use range="minmax", "moving_average" or "histogram"'
        )

    def facts(self) -> Facts:
        """Return what was seen, for other observers, processes and backends."""
        return Facts(screen=self.screen, set_range=self.set_range)

    def take(self, facts: Facts) -> None:
        """Go by what another observer has seen, in place of what this one has.

        Raises:
            StatisticsError: it did not keep what this one needs.
        """
        self.screen = Screen()
        if facts.screen is not None:
            self.screen.merge(facts.screen)
        self.set_range = facts.set_range

    @property
    def calibrated(self) -> bool:
        """Tell whether `calculate_qparams` has something to go by."""
        raise NotImplementedError

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point, shape `()` per tensor and `(C,)` per channel."""
        raise NotImplementedError

    def _qparams(self, minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
        return choose_qparams(
            minimum,
            maximum,
            dtype=self.dtype,
            quant_min=self._asked[0],
            quant_max=self._asked[1],
            qscheme=self.qscheme,
            eps=self.eps,
        )

    def _check_calibrated(self) -> None:
        if not self.calibrated:
            raise UncalibratedError([self.subject])

    def _screened(self, x: Tensor) -> Cleaned:
        return self.screen.clean(x, self.subject, self.ends)

    def _only_here(self) -> str | None:
        """Return why other engines cannot quantize the tensor as qompose's would, None where they can."""
        return self.screen.mask and f"has {self.screen.mask}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load statistics, which have the size of what was seen, into an observer that saw nothing."""
        for name, own in self._buffers.items():
            saved = state_dict.get(prefix + name)
            if own is not None and isinstance(saved, Tensor) and saved.shape != own.shape:
                self._buffers[name] = torch.empty_like(saved, dtype=own.dtype, device=own.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def convert(self) -> Callable[[GraphModule, Node], None]:
        """Return what torchao's engine is to do with this observer, where its own conversion would be wrong.

        That engine asks whether there is such an attribute, and there is none as a rule.
        """
        reason = self._only_here()
        if reason is None:
            raise AttributeError("a qompose observer has no convert method")

        def leave_in_float(model: GraphModule, node: Node) -> None:
            source = node.args[0]
            assert isinstance(source, Node)
            if self.is_dynamic:  # torchao looks for the operator that chooses the parameters
                raise ConfigError(f"{self.subject} {reason}")
            warnings.warn(
                f"{self.subject} {reason}, so it stays in float", QomposeWarning, stacklevel=2
            )
            node.replace_all_uses_with(source)
            model.graph.erase_node(node)

        return leave_in_float

    def extra_repr(self) -> str:
        """Return what torch prints between the parentheses."""
        return f"dtype={self.dtype}, qscheme={self.qscheme}, range=({self.quant_min}, {self.quant_max})"


class RangeObserver(Observer):
    """An observer whose statistics are one minimum and one maximum, per tensor or per channel.

    Scales are rounded to `scale_dtype`, for kernels that store them in fewer bits; they stay float32. So
    are offsets, where zero points are not integers (`stored_in`).
    """

    mergeable = True
    minimum: Tensor
    maximum: Tensor

    def __init__(
        self,
        dtype: torch.dtype = torch.uint8,
        ch_axis: int = 0,
        scale_dtype: torch.dtype = torch.float32,
        **arguments: Any,
    ) -> None:
        super().__init__(dtype, **arguments)
        if not scale_dtype.is_floating_point:
            raise ConfigError(f"scale_dtype must be a float dtype, got {scale_dtype}")
        self.ch_axis, self.scale_dtype = ch_axis, scale_dtype
        # A shape that ranges never have. Not empty ones, which safetensors, when it loads, never shares.
        for name in ("minimum", "maximum"):
            self.register_buffer(name, torch.zeros(() if self.per_channel else (1,)))

    def observe(self, x: Tensor) -> None:
        self.widen(*self.extremes(x))

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value of a batch, or of its slices, without mask values."""
        return self._extremes(self._screened(x))

    def widen(self, low: Tensor, high: Tensor) -> None:
        """Update the statistics with the extremes of a batch, of the tensor or of each channel."""
        if self.calibrated:
            self.minimum, self.maximum = self.minimum.to(low.device), self.maximum.to(low.device)
            low, high = self._combine(low, high)
        self.minimum, self.maximum = low, high

    def _extremes(self, seen: Cleaned) -> tuple[Tensor, Tensor]:
        if not self.per_channel:
            return seen.low, seen.high
        return slice_extremes(seen.values, self.ch_axis)

    def _combine(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.minimum(self.minimum, low), torch.maximum(self.maximum, high)

    def state(self) -> dict[str, Tensor]:
        """Return all that was seen as tensors, none of which shares memory: what `restore` takes."""
        screen = self.screen
        seen = [screen.masked, screen.values, screen.bulk, screen.far]
        return {
            "screen": torch.tensor(seen, dtype=torch.float64),
            "minimum": self.minimum.clone(),
            "maximum": self.maximum.clone(),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the place of an observer whose state this is; the tensors are used as they are."""
        self.minimum, self.maximum = state["minimum"], state["maximum"]
        masked, values, bulk, far = state["screen"].tolist()
        self.screen.masked, self.screen.values = int(masked), int(values)
        self.screen.bulk, self.screen.far = bulk, far

    def facts(self) -> Facts:
        if not self.calibrated:
            return super().facts()
        low, high = self.minimum.cpu(), self.maximum.cpu()
        if self.per_channel:
            return replace(super().facts(), channels=Channels(self.ch_axis, low, high))
        return replace(super().facts(), minimum=float(low), maximum=float(high))

    def take(self, facts: Facts) -> None:
        low, high = self._taken(facts)
        super().take(facts)
        self.minimum, self.maximum = low, high

    def _taken(self, facts: Facts) -> tuple[Tensor, Tensor]:
        if self.per_channel:
            return facts.channel_ranges(self.ch_axis)
        if facts.set_range is not None:
            low, high = facts.set_range
        elif facts.minimum is None or facts.maximum is None:
            raise StatisticsError("no range was recorded for the whole tensor")
        else:
            low, high = facts.minimum, facts.maximum
        return torch.tensor(low), torch.tensor(high)

    @property
    def calibrated(self) -> bool:
        return (self.minimum.dim() > 0) == self.per_channel

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.qparams_of_part(1.0)

    def qparams_of_part(self, part: float) -> tuple[Tensor, Tensor]:
        """Return those of a part of the range, about 0, or about its middle if 0 need not be exact."""
        self._check_calibrated()
        middle = (self.minimum + self.maximum) / 2 if self.qscheme in FLOAT_ZERO_POINT else 0.0
        ends = self.minimum, self.maximum
        if part != 1.0:
            ends = middle + part * (ends[0] - middle), middle + part * (ends[1] - middle)
        found = self._qparams(*ends)
        return found if self.scale_dtype is torch.float32 else stored_in(self.scale_dtype, *found)


def keeps_a_range_alone(observer: nn.Module) -> bool:
    """Tell whether `RangeObserver.state` is all that an observer knows; a class of others may know more."""
    return isinstance(observer, RangeObserver) and type(observer).__module__ == __name__


class MinMaxObserver(RangeObserver):
    """The exact minimum and maximum of all that was seen."""


class PerChannelMinMaxObserver(MinMaxObserver):
    """The exact minimum and maximum of each slice along `ch_axis`."""

    per_channel = True


class PerBlockMinMaxObserver(RangeObserver):
    """The exact minimum and maximum of each block: `block_size` as in `QuantizationSpec`."""

    per_channel = True

    def __init__(
        self, dtype: torch.dtype = torch.uint8, block_size: tuple[int, ...] = (), **arguments: Any
    ) -> None:
        super().__init__(dtype, **arguments)
        self.block_size = block_size

    def _only_here(self) -> str | None:
        return _blocks(self.block_size)

    def _extremes(self, seen: Cleaned) -> tuple[Tensor, Tensor]:
        x = seen.values
        sizes = full_blocks(tuple(x.shape), self.block_size)
        if x.dtype is torch.float32 or not sizes:
            return _ends_of(x.float(), sizes)
        # Of halves torch finds them in five times the time; all of them as floats would be another copy.
        parts = [_ends_of(rows.float(), sizes) for _, _, rows in in_rows(x, multiple=sizes[0])]
        low, high = (torch.cat(ends) for ends in zip(*parts, strict=True))
        return low, high


def _ends_of(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of each block of a float32 tensor."""
    blocks = in_blocks(x, sizes)
    inner = tuple(range(1, blocks.dim(), 2))
    return blocks.amin(inner), blocks.amax(inner)


def _blocks(block_size: tuple[int, ...]) -> str:
    return f"has block_size={block_size}, which the operators of this engine do not support"


class MovingAverageMinMaxObserver(RangeObserver):
    """Exponential averages of each batch's minimum and maximum: `m += averaging_constant * (batch - m)`."""

    mergeable = False

    def __init__(
        self, dtype: torch.dtype = torch.uint8, averaging_constant: float = 0.01, **arguments: Any
    ) -> None:
        super().__init__(dtype, **arguments)
        self.averaging_constant = averaging_constant

    def facts(self) -> Facts:
        return replace(super().facts(), averaged=type(self).__name__)

    def _combine(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        rate = self.averaging_constant
        return (
            self.minimum + rate * (low - self.minimum),
            self.maximum + rate * (high - self.maximum),
        )


class MovingAveragePerChannelMinMaxObserver(MovingAverageMinMaxObserver):
    """`MovingAverageMinMaxObserver` for each slice along `ch_axis`."""

    per_channel = True


class _WithoutStatistics(Observer):
    """An observer that keeps no statistics."""

    estimates = False

    def observe(self, x: Tensor) -> None:
        """Look at nothing, whatever the shape."""

    @property
    def calibrated(self) -> bool:
        return True


class PlaceholderObserver(_WithoutStatistics):
    """Keeps no statistics: for dynamic quantization, whose parameters come from each tensor."""

    looks = False

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        block_size: tuple[int, ...] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(dtype, **arguments)
        self.block_size = block_size

    def _only_here(self) -> str | None:
        if self.dtype is torch.bfloat16:
            return "is quantized to bfloat16, which the operators of this engine do not support"
        return None if self.block_size is None else _blocks(self.block_size)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Refuse: both, of shape `()`, come from each tensor when the model runs.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a PlaceholderObserver does not compute quantization parameters")


class FixedQParamsObserver(_WithoutStatistics):
    """Scale and zero point that are known beforehand."""

    def __init__(
        self, scale: float, zero_point: int, dtype: torch.dtype = torch.uint8, **arguments: Any
    ) -> None:
        super().__init__(dtype, **arguments)
        self.scale: Tensor
        self.zero_point: Tensor
        self.register_buffer("scale", torch.tensor(float(scale)))
        self.register_buffer("zero_point", torch.tensor(int(zero_point)))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point


class LastSeen:
    """Remembers which values of which storage were seen last, and keeps none of them alive.

    The address alone would not do: the next tensor may stand where this one was. While there is a weak
    reference to a storage, no other storage has its identity. Copies remember nothing.
    """

    def __init__(self) -> None:
        self._storage: Any = None
        self._part: tuple[object, ...] | None = None

    def again(self, x: Tensor) -> bool:
        """Tell whether `x` holds just the values that were seen last, in whatever order, and remember it."""
        part = _part_of(x)
        storage = None if part is None else StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        last, self._storage = self._storage, storage
        before, self._part = self._part, part
        if last is None or storage is None:
            return False
        return bool(last.cdata == storage.cdata and not last.expired() and before == part)

    def __deepcopy__(self, memo: dict[int, Any]) -> LastSeen:
        return LastSeen()

    def __reduce__(self) -> tuple[type[LastSeen], tuple[()]]:
        return LastSeen, ()


def _part_of(x: Tensor) -> tuple[object, ...] | None:
    """Return which part of its storage a tensor covers, and the version; None where it leaves gaps."""
    if x.numel() == 0 or type(x) is not Tensor:
        return None
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    repeated = any(step == 0 and size > 1 for size, step in zip(x.shape, x.stride(), strict=True))
    if span != x.numel() or repeated:
        return None
    return int(x.storage_offset()), x.numel(), version_of(x)


def version_of(x: Tensor) -> object:
    """Return what is the same again only if `x` was not written to since.

    torch counts no writes to tensors made in inference mode: for them it is never the same.
    """
    return object() if x.is_inference() else x._version


def several_processes() -> bool:
    """Tell whether `torch.distributed` is initialised."""
    return distributed.is_available() and distributed.is_initialized()


def gathered(x: Tensor) -> list[Tensor]:
    """Return what each process has of a tensor of one shape, on the CPU, by rank."""
    on_gpu = distributed.get_backend() == "nccl"
    own = x.to(torch.device("cuda", torch.cuda.current_device())) if on_gpu else x
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, own)
    return [part.cpu() for part in parts]
