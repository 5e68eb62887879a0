# SPDX-License-Identifier: Apache-2.0
"""The C++ of native/ computes what its operators mean in torch: random products, extremes, ends of memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.native import code, processor, products
from qompose_x86_inductor.native.processor import Isa
from qompose_x86_inductor.native.products import FUNCTIONS, KINDS, ProductEnds, ProductSizes
from torch import Tensor

MOST = float("inf")

Run = Callable[..., Tensor]


@pytest.fixture(scope="module")
def native(library: ctypes.CDLL) -> Run:
    """Return what runs the C++ on the arguments of `products.PRODUCT` or ``DEPTHWISE``."""
    function = library.run

    def run(operator: Any, *arguments: Any, x: int | None = None, threads: int = 1) -> Tensor:
        image, *constants, other, sizes, ends = arguments
        result = torch.full(
            ProductSizes.read(sizes).shape(image), 77, dtype=KINDS[ProductSizes.read(sizes).kind]
        )
        kind = 2 if other is None else KINDS.index(other.dtype)
        failed = function(
            ctypes.c_int(threads),
            ctypes.c_bool(operator is products.DEPTHWISE),
            ctypes.c_void_p(image.data_ptr() if x is None else x),
            (ctypes.c_int64 * 4)(*image.shape),
            *(None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (*constants, other)),
            ctypes.c_int(kind),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_double * len(ends))(*ends),
            ctypes.c_void_p(result.data_ptr()),
        )
        assert not failed
        return result

    return run


def a_weight(
    channels: int, depth: int, kernel: tuple[int, int], depthwise: bool, isa: Isa = processor.AVX2
) -> Tensor:
    """With the ends of what is multiplied exactly."""
    shape, (low, high) = (channels, 1 if depthwise else depth, *kernel), isa.weights
    weight = torch.randint(low, high + 1, shape, dtype=torch.int8)
    return torch.where(torch.rand(shape) < 0.2, low, weight).to(torch.int8)


@st.composite
def calls(draw: st.DrawFn, isa: Isa, *, depthwise: bool) -> tuple[Any, ...]:
    """Arguments of an operator, from all that `products` may ask of it."""
    whole = draw(st.integers(1, 150)) if depthwise else 0
    groups = 1 if depthwise else draw(st.sampled_from([1, 1, 2, 3, 5, 9, 32]))
    depth = whole or draw(st.integers(1, 70 if groups == 1 else 20))
    channels = whole or groups * draw(st.integers(1, 200 if groups == 1 else 40))
    if groups > 1 and draw(st.booleans()):
        depth = draw(st.sampled_from([4, 8]))  # some of which are one vector of outputs
        channels = depth * groups
    pair = lambda low, high: st.tuples(*[st.integers(low, high)] * 2)  # noqa: E731
    square = st.sampled_from([(1, 1), (3, 3), (5, 5)])
    kernel = draw(square | pair(1, 4))
    dilation, stride = draw(st.just((1, 1)) | pair(1, 3)), draw(pair(1, 3))
    padding = draw(pair(0, 4))
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    height, width = (draw(st.integers(low, low + 9)) for low in least)
    kind, function = draw(st.integers(0, 2)), draw(st.integers(0, len(FUNCTIONS) - 1))
    bounds = [(0, 255), (-128, 127)][kind] if kind < 2 else None
    zero_point = draw(st.integers(*bounds)) if bounds else 0
    sizes = ProductSizes(
        channels, kernel, stride, padding, dilation, draw(st.integers(0, 255)), function,
        zero_point, kind, isa.lanes,
    )  # fmt: skip
    low, high = (
        (float(b - zero_point) for b in bounds)
        if bounds
        else (draw(st.sampled_from([-MOST, 0.0])), MOST)
    )
    if bounds:
        low += draw(st.sampled_from([0.0, 0.5, 40.5]))  # as a post-op may bound values
    torch.manual_seed(draw(st.integers(0, 99)))
    shape = (draw(st.integers(1, 3)), height, width, depth * groups)
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    weight = a_weight(channels, depth, kernel, depthwise, isa)
    spread = 60.0 if kind < 2 and function == 0 else 2.0
    terms = weight[0].numel()
    scale = torch.rand(channels) * spread / (5000 * terms**0.5)
    ends = ProductEnds(
        other_scale=0.3, other_zp=draw(st.integers(-5, 9)) * 1.0, slope=0.1, low=low, high=high,
    )  # fmt: skip
    per_step = (0.5 + torch.rand(channels)) * (30.0 if kind < 2 else 1.0)
    other = None if depthwise else draw(st.sampled_from([None, *KINDS]))
    if groups > 1:
        weight, sizes = products.in_groups(weight, groups, sizes)
    bias = torch.randn(channels)
    constants = prepared(weight, scale, bias, sizes, per_step, depthwise=depthwise)
    added = None if other is None else (torch.randn(sizes.shape(x)) * 9).to(other)
    return x, *constants, added, sizes.flat(), [*ends]


def prepared(
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    sizes: ProductSizes,
    per_step: Tensor | None = None,
    *,
    depthwise: bool,
) -> list[Tensor | None]:
    """What operators read for each channel; ``per_step`` only where there is a function."""
    start = -sizes.x_zp * weight.sum((1, 2, 3), dtype=torch.int32)
    values = [start, scale, bias]
    if sizes.function:
        values.append(torch.ones_like(scale) if per_step is None else per_step)
    packed = [products.per_channel(v, sizes.lanes, depthwise=depthwise) for v in values]
    return [
        products.pack(weight, sizes, depthwise=depthwise), *packed, *[None] * (4 - len(packed)),
    ]  # fmt: skip


def agree(got: Tensor, wanted: Tensor) -> None:
    """Integers differ by a step where a value lies in the middle between two; floats by their rounding."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
        return
    apart = (got.int() - wanted.int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) <= max(0.002, 1.01 / got.numel())


@pytest.mark.parametrize("depthwise", [False, True], ids=["products", "channels by themselves"])
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_products(native: Run, isa: Isa, depthwise: bool, data: st.DataObject) -> None:
    arguments = data.draw(calls(isa, depthwise=depthwise))
    wanted = products.reference(*arguments, depthwise=depthwise)
    agree(native(products.DEPTHWISE if depthwise else products.PRODUCT, *arguments), wanted)


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 70), st.integers(0, 255), st.booleans())
@settings(max_examples=60, deadline=None)
def test_planes(
    library: ctypes.CDLL, images: int, channels: int, pixels: int, zp: int, narrow: bool
) -> None:
    x = torch.randn(images, channels, 1, pixels) * 3
    low, high = (10, 100) if narrow else (0, 255)
    result = torch.full((images * pixels * channels + 64,), 77, dtype=torch.uint8)
    library.quantize(
        ctypes.c_int(1), ctypes.c_void_p(x.data_ptr()), *map(ctypes.c_int64, (images, channels, pixels)),
        ctypes.c_float(1 / 0.03), *map(ctypes.c_int, (zp, low, high)), ctypes.c_void_p(result.data_ptr()),
    )  # fmt: skip
    wanted = products.reference_planes(x, 0.03, zp, low, high)
    assert torch.equal(result[:-64], wanted.flatten())
    assert bool((result[-64:] == 77).all())  # nothing is written behind it


def sums_of(
    x: Tensor,
    weight: Tensor,
    isa: Isa = processor.AVX2,
    *,
    depthwise: bool,
    padding: int = 0,
    zero_point: int = 0,
    groups: int = 1,
) -> tuple[Any, ...]:
    """Arguments of an operator that returns the plain sums, as floats."""
    channels, _, *kernel = weight.shape
    sizes = ProductSizes(
        channels, (kernel[0], kernel[1]), (1, 1), (padding, padding), (1, 1), zero_point, 0, 0,
        KINDS.index(torch.float32), isa.lanes,
    )  # fmt: skip
    ends = ProductEnds(1.0, 0.0, 0.0, -MOST, MOST)
    scale, bias = torch.ones(channels), torch.zeros(channels)
    if groups > 1:
        weight, sizes = products.in_groups(weight, groups, sizes)
    constants = prepared(weight, scale, bias, sizes, depthwise=depthwise)
    return x, *constants, None, sizes.flat(), [*ends]


@pytest.mark.parametrize("depthwise", [False, True])
def test_a_stride_far_beyond_the_image_takes_no_memory(
    native: Run, isa: Isa, depthwise: bool
) -> None:
    x = torch.randint(0, 256, (2, 4, 5, 7), dtype=torch.uint8)
    arguments = [*sums_of(x, a_weight(7, 7, (3, 3), depthwise), isa, depthwise=depthwise)]
    arguments[7] = ProductSizes.read(arguments[7])._replace(stride=(1, 1 << 40)).flat()
    got = native(products.DEPTHWISE if depthwise else products.PRODUCT, *arguments)
    assert torch.equal(got, products.reference(*arguments, depthwise=depthwise))


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize(
    ("depth", "channels", "taps"), [(4096, 65, 1), (64, 64, 3), (3, 16, 7), (64, 64, -3)]
)
def test_the_largest_sums_are_exact(
    native: Run, isa: Isa, end: int, depth: int, channels: int, taps: int
) -> None:
    depthwise, taps, value = taps < 0, abs(taps), isa.weights[end]
    x = torch.full((1, 8, 9, depth), 255, dtype=torch.uint8)
    weight = a_weight(channels, depth, (taps, taps), depthwise).fill_(value)
    operator = products.DEPTHWISE if depthwise else products.PRODUCT
    got = native(operator, *sums_of(x, weight, isa, depthwise=depthwise))
    assert torch.equal(got, torch.full_like(got, 255.0 * value * weight[0].numel()))


@contextmanager
def at_the_end_of_memory(x: Tensor) -> Iterator[int]:
    """Where its bytes stand again, right before a page that nobody may read."""
    size = (x.numel() // mmap.PAGESIZE + 2) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + size - mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    begin = start + size - mmap.PAGESIZE - x.numel()
    ctypes.memmove(begin, x.data_ptr(), x.numel())
    yield begin


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("kernel", [(1, 1), (1, 2), (5, 5)])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("depth", [1, 5, 67])
def test_nothing_is_read_behind_an_image(
    native: Run, isa: Isa, kernel: tuple[int, int], padding: int, depth: int, depthwise: bool
) -> None:
    torch.manual_seed(depth)
    x = torch.randint(0, 256, (2, 6, 7, depth), dtype=torch.uint8)
    weight = a_weight(depth if depthwise else 5, depth, kernel, depthwise)
    arguments = sums_of(x, weight, isa, depthwise=depthwise, padding=padding, zero_point=3)
    operator = products.DEPTHWISE if depthwise else products.PRODUCT
    with at_the_end_of_memory(x) as place:
        got = native(operator, *arguments, x=place)
    assert torch.equal(got, products.reference(*arguments, depthwise=depthwise))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (3, 1)])
@pytest.mark.parametrize(
    ("groups", "depth", "each"), [(18, 4, 4), (3, 8, 8), (7, 1, 2), (5, 24, 20), (2, 3, 5)]
)
def test_groups_are_those_of_torch_and_read_nothing_behind_an_image(
    native: Run,
    isa: Isa,
    groups: int,
    depth: int,
    each: int,
    kernel: tuple[int, int],
    padding: int,
) -> None:
    torch.manual_seed(groups)
    x = torch.randint(0, 256, (2, 6, 7, depth * groups), dtype=torch.uint8)
    weight = a_weight(each * groups, depth, kernel, depthwise=False)
    image = F.pad(x.permute(0, 3, 1, 2).double(), [padding] * 4, value=3) - 3
    wanted = F.conv2d(image, weight.double(), groups=groups).permute(0, 2, 3, 1).float()
    arguments = sums_of(
        x, weight, isa, depthwise=False, padding=padding, zero_point=3, groups=groups
    )
    with at_the_end_of_memory(x) as place:
        assert torch.equal(native(products.PRODUCT, *arguments, x=place, threads=3), wanted)
    assert torch.equal(products.reference(*arguments, depthwise=False), wanted)


@given(
    st.integers(1, 90), st.integers(1, 150), st.tuples(*[st.integers(1, 4)] * 2),
    st.integers(1, 2), st.booleans(), st.sampled_from([8, 16]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_packing_loses_nothing(
    depth: int, channels: int, kernel: tuple[int, int], gap: int, depthwise: bool, lanes: int
) -> None:
    sizes = ProductSizes(channels, kernel, (1, 1), (0, 0), (1, gap), 0, 0, 0, 0, lanes)
    weight = a_weight(channels, depth, kernel, depthwise)
    packed = products.pack(weight, sizes, depthwise=depthwise)
    assert torch.equal(products.unpack(packed, sizes, depth, depthwise=depthwise), weight)


def test_what_sizes_write_they_read() -> None:
    sizes = ProductSizes(9, (1, 2), (3, 4), (5, 6), (7, 8), 10, 1, 11, 2, 8, 12, 16, 4)
    assert ProductSizes.read(sizes.flat()) == sizes


def test_running_it_uncompiled_says_so() -> None:
    x = torch.full((1, 1, 2, 3), 5, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="cpp_wrapper"):
        result = products.PRODUCT(*sums_of(x, torch.ones(2, 3, 1, 1).char(), depthwise=False))
    assert torch.equal(result, torch.full((1, 1, 2, 2), 15.0))


def test_a_function_that_was_left_out_is_an_error() -> None:
    """And not taken for none."""
    isa = processor.isa()
    if isa is None:
        pytest.skip("our C++ is for no set of this processor")
    included = code.included("arguments.h", isa, "QOMPOSE_FUNCTIONS 2")
    text = f"""#include <vector>
{included}
using namespace qompose_x86;
extern "C" int lacks(int function, bool depthwise) try {{
  const auto which = static_cast<Function>(function);
  if (depthwise) return depthwise_of(which, Part::ALL) == nullptr;
  Finish finish = {{}};
  finish.function = which;
  return ending_of(finish).tile == nullptr;
}} catch (const std::logic_error&) {{
  return 2;
}}
"""
    lacks = code.loaded(text, "lacks", "tests")
    assert lacks is not None
    for depthwise in (False, True):
        found = [lacks(function, depthwise) for function in range(len(FUNCTIONS))]
        assert found == [2, 0, *[2] * 5]


def test_another_version_of_the_code_is_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or torch would take what it compiled before from its caches."""
    before = products.shims(processor.AVX2, {0}, alone=True)[products.PRODUCT]
    others = [
        (processor.AVX512, {0}, True),
        (processor.AVX2, {3}, True),
        (processor.AVX2, {0}, False),
    ]
    for isa, functions, alone in others:
        assert products.shims(isa, functions, alone=alone)[products.PRODUCT] != before
    (tmp_path / "shims.h").write_text("// another")
    monkeypatch.setattr(code, "HEADERS", tmp_path)
    after = products.shims(processor.AVX2, {0}, alone=True)[products.PRODUCT]
    digests = [
        [line for line in texts[0].splitlines() if "//" in line] for texts in (before, after)
    ]
    assert digests[0] != digests[1]


def with_bias(
    values: list[float], channels: int, kind: torch.dtype, isa: Isa, function: int = 0
) -> tuple[Any, ...]:
    """Arguments of a product of zeros, whose bias goes through a function: a row for each value."""
    zero_point, limits = (0, None) if kind == torch.float32 else (7, torch.iinfo(kind))
    low, high = (-MOST, MOST) if limits is None else (limits.min - 7.0, limits.max - 7.0)
    sizes = ProductSizes(
        channels,
        (1, 1),
        (1, 1),
        (0, 0),
        (1, 1),
        0,
        function,
        zero_point,
        KINDS.index(kind),
        isa.lanes,
    )
    weight = torch.zeros(channels, 4, 1, 1, dtype=torch.int8)
    constants = prepared(
        weight, torch.ones(channels), torch.zeros(channels), sizes, depthwise=False
    )
    other = torch.tensor(values)[:, None].expand(-1, channels).reshape(1, 1, -1, channels)
    ends = ProductEnds(1.0, 0.0, 0.1, low, high)
    x = torch.zeros(1, 1, len(values), 4, dtype=torch.uint8)
    return x, *constants, other.contiguous(), sizes.flat(), [*ends]


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize("function", range(len(FUNCTIONS)))
def test_nan_is_the_lowest_integer_in_whole_and_in_ragged_tiles(
    native: Run, isa: Isa, kind: torch.dtype, function: int
) -> None:
    arguments = with_bias([float("nan"), 0.0], 64 + 16 + 3, kind, isa, function)
    got = native(products.PRODUCT, *arguments)
    assert bool((got[0, 0, 0] == torch.iinfo(kind).min).all())
    assert torch.equal(got, products.reference(*arguments, depthwise=False))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nan_of_channels_by_themselves(native: Run, isa: Isa, kind: torch.dtype) -> None:
    x = torch.zeros(1, 4, 4, 67, dtype=torch.uint8)
    arguments = [*sums_of(x, torch.ones(67, 1, 3, 3).char(), isa, depthwise=True)]
    arguments[4] = arguments[4] + float("nan")
    arguments[7] = ProductSizes.read(arguments[7])._replace(kind=KINDS.index(kind)).flat()
    if kind != torch.float32:
        arguments[8][-2:] = [
            float(limit) for limit in (torch.iinfo(kind).min, torch.iinfo(kind).max)
        ]
    got = native(products.DEPTHWISE, *arguments)
    lowest = got.isnan() if kind == torch.float32 else got == torch.iinfo(kind).min
    assert bool(lowest.all())


@pytest.mark.parametrize("function", range(len(FUNCTIONS)))
def test_huge_values_are_those_of_torch(native: Run, isa: Isa, function: int) -> None:
    values = [s * v for v in (1e4, 1e10, 1e20, 3e38) for s in (1, -1)]
    arguments = with_bias([*values, float("nan")], 19, torch.float32, isa, function)
    got = native(products.PRODUCT, *arguments)
    wanted = products.reference(*arguments, depthwise=False)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("threads", [2, 8, 64])
@pytest.mark.parametrize(
    ("depthwise", "groups"), [(False, 1), (False, 8), (True, 1)], ids=["one", "groups", "channels"]
)
def test_threads_compute_the_same_and_ask_for_no_memory(
    library: ctypes.CDLL, native: Run, isa: Isa, threads: int, depthwise: bool, groups: int
) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (2, 33, 35, 96), dtype=torch.uint8)
    weight = a_weight(96, 96 // groups, (3, 3), depthwise)
    arguments = sums_of(x, weight, isa, depthwise=depthwise, padding=1, groups=groups)
    operator = products.DEPTHWISE if depthwise else products.PRODUCT
    counts = [library.count_allocations(False), library.count_allocations(True)]
    got = native(operator, *arguments, threads=threads)
    assert library.threads(ctypes.c_int64(x.numel() * 9), ctypes.c_int64(64), threads) > 1
    assert library.count_allocations(False) > counts[0]
    assert library.count_allocations(True) == counts[1] == 0
    assert torch.equal(got, native(operator, *arguments, threads=1))


@pytest.mark.parametrize(
    ("products", "parts", "expected"),
    [(1 << 16, 100, 1), (1 << 30, 1, 1), (1 << 30, 100, 8), (0, 0, 1)],
)
def test_little_work_is_that_of_one_thread(
    library: ctypes.CDLL, products: int, parts: int, expected: int
) -> None:
    assert library.threads(ctypes.c_int64(products), ctypes.c_int64(parts), 8) == expected


class Operator:
    """An operator of the library on tensors, as compiled programs call it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.operator_of

    def __call__(self, depthwise: bool, *arguments: Any) -> Tensor | None:
        *tensors, per_step, other, sizes, ends = arguments
        given = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor
        handles = [*map(given, tensors)]
        optional = [None if tensor is None else given(tensor) for tensor in (per_step, other)]
        result = ctypes.c_void_p()
        failed = self._function(
            ctypes.c_bool(depthwise),
            (ctypes.c_void_p * len(handles))(*map(pointer, handles)),
            *(None if h is None else ctypes.byref(ctypes.c_void_p(pointer(h))) for h in optional),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_double * len(ends))(*ends),
            ctypes.byref(result),
        )
        for handle in (*handles, *optional):
            if handle is not None:
                torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(handle)
        if failed:
            assert result.value is None
            return None
        return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(result.value))


def pointer(handle: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(handle, None)


def capsule(address: int | None) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)


def small_sums(isa: Isa, other: Tensor | None = None, channels: int = 5) -> list[Any]:
    x = torch.randint(0, 256, (1, 4, 4, channels), dtype=torch.uint8)
    arguments = [*sums_of(x, a_weight(channels, channels, (1, 1), False), isa, depthwise=False)]
    arguments[6] = other
    return arguments


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_operator_takes_and_returns_tensors(
    library: ctypes.CDLL, isa: Isa, kind: torch.dtype
) -> None:
    arguments = small_sums(isa, torch.ones(1, 4, 4, 5).to(kind))
    got = Operator(library)(False, *arguments)
    assert got is not None
    assert torch.equal(got, products.reference(*arguments, depthwise=False))


def _too_small(arguments: list[Any]) -> None:
    """By one, at a stride that rounds the missing pixel away."""
    sizes = ProductSizes.read(arguments[7])._replace(kernel=(5, 5), stride=(2, 2))
    weight = a_weight(5, 5, (5, 5), False)
    arguments[1], arguments[7] = products.pack(weight, sizes, depthwise=False), sizes.flat()


WRONG = {
    "smaller than the kernel": _too_small,
    "must be uint8, int8 or float32": lambda a: a.__setitem__(6, torch.ones(1, 4, 4, 5).bfloat16()),
    "the added tensor has the wrong shape": lambda a: a.__setitem__(6, torch.ones(1, 4, 2, 5)),
    "must be contiguous": lambda a: a.__setitem__(
        0, a[0].transpose(1, 3).contiguous().transpose(1, 3)
    ),
    "must have four dimensions": lambda a: a.__setitem__(0, a[0][0]),
    "x must be uint8": lambda a: a.__setitem__(0, a[0].float()),
    "a constant has the wrong dtype": lambda a: a.__setitem__(3, a[3].double()),
    "packed for another vector width": lambda a: a.__setitem__(
        7, ProductSizes.read(a[7])._replace(lanes=4).flat()
    ),
    "a function has no factors": lambda a: a.__setitem__(
        7, ProductSizes.read(a[7])._replace(function=1).flat()
    ),
    "a constant has the wrong size": lambda a: a.__setitem__(1, a[1][:-1]),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_call_that_fails_says_why_and_keeps_nothing(
    library: ctypes.CDLL, isa: Isa, capfd: pytest.CaptureFixture[str], message: str
) -> None:
    arguments = small_sums(isa)
    WRONG[message](arguments)
    assert Operator(library)(False, *arguments) is None
    assert "native_product: " in (said := capfd.readouterr().err)
    assert message in said


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 4, 5), (1, 4, 4, 0), (1, 1, 0, 5), (1, 1, 1, 1)])
def test_sizes_of_none_and_one(
    library: ctypes.CDLL, isa: Isa, shape: tuple[int, ...], depthwise: bool
) -> None:
    x = torch.full(shape, 200, dtype=torch.uint8)
    channels = shape[3] if depthwise else 3
    weight = a_weight(channels, shape[3], (1, 1), depthwise)
    arguments = sums_of(x, weight, isa, depthwise=depthwise)
    got = Operator(library)(depthwise, *arguments)
    assert got is not None
    assert got.shape == (*shape[:3], channels)
    empty = x.numel() == 0  # torch's convolution would refuse it
    wanted = torch.zeros_like(got) if empty else products.reference(*arguments, depthwise=depthwise)
    assert torch.equal(got, wanted)
