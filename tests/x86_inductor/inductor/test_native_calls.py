# SPDX-License-Identifier: Apache-2.0
"""Compiled programs hold products of our own, and compute what the lowered model computes."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_x86_inductor.backend import X86InductorBackend
from qompose_x86_inductor.inductor import native_calls
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import processor, products
from qompose_x86_inductor.native.products import FUNCTIONS
from qompose_x86_inductor.onednn.arguments import Output, Product, ProductCall, Summand
from qompose_x86_inductor.onednn.post_ops import POST_OPS
from qompose_x86_inductor.operators import linear_packed
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from tests.core.toy import Model
from tests.sampling import at_once
from tests.x86_inductor import small_models

pytestmark = [
    pytest.mark.usefixtures("nothing_is_kept"),
    pytest.mark.skipif(processor.of_machine() is None, reason="the C++ is not for this processor"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
PRODUCT, DEPTHWISE, ONEDNN = "cpu_native_product(", "cpu_native_depthwise(", "cpu__q"


def block() -> nn.Module:
    """Every form of a convolution: of images, by channel, with a sum behind it; and one that is NaN."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.relu(x + m.narrow(m.wide(x)))
        return m.last(F.hardswish(m.dilated(x)))

    last = nn.Conv2d(70, 6, (1, 3), stride=(2, 1))
    torch.nn.init.constant_(last.bias[:1], float("nan"))
    return Model(
        forward,
        stem=nn.Sequential(nn.Conv2d(3, 20, 3, 2, 1), nn.BatchNorm2d(20), nn.ReLU6()),
        wide=nn.Sequential(nn.Conv2d(20, 20, 5, padding=2, groups=20), nn.Hardswish()),
        narrow=nn.Conv2d(20, 20, 1),
        dilated=nn.Conv2d(20, 70, 3, padding=2, dilation=2),
        last=last,
    )


def sequences() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.silu(m.second(F.leaky_relu(m.first(x), 0.2))).transpose(1, 2)
        return x + m.outer(F.gelu(m.inner(x)))

    convolutions = {
        "first": nn.Conv1d(5, 19, 3, padding=1),
        "second": nn.Conv1d(19, 19, 5, groups=19),
    }
    return Model(forward, **convolutions, inner=nn.Linear(19, 40), outer=nn.Linear(40, 19))


def image(batch: int) -> Tensor:
    return torch.randn(batch, 3, 21, 26, generator=torch.Generator().manual_seed(batch))


def sequence(batch: int) -> Tensor:
    return torch.randn(batch, 5, 17, generator=torch.Generator().manual_seed(batch))


def lowered(module: nn.Module, make: Callable[[int], Tensor], **choices: Any) -> GraphModule:
    """For any number of inputs."""
    torch.manual_seed(0)
    return small_models.lowered(module, make(8), ({0: Dim("batch", max=64)},), **choices)


def source(package: Path) -> str:
    """The C++ of a package, without what it includes."""
    with zipfile.ZipFile(package) as archive:
        names = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
        return "".join(archive.read(name).decode() for name in names)


def assert_same(
    run: Callable[[Tensor], Tensor], model: GraphModule, make: Callable[[int], Tensor]
) -> None:
    """Up to a few integers that lie in the middle between two, and their share in what follows."""
    for batch in (4, 1, 7):
        expected, found = model(make(batch)), run(make(batch))
        assert torch.equal(found.isnan(), expected.isnan())
        error = (found - expected).nan_to_num(0).norm() / expected.nan_to_num(0).norm()
        assert error < 0.01


@pytest.mark.parametrize(
    ("module", "make", "products", "by_channel", "mode"),
    at_once(
        [
            (*row, mode)
            for row in ((block, image, 4, 1), (sequences, sequence, 3, 1))
            for mode in ("default", "package")
        ],
        (block, image, 4, 1, "package"),
    ),
)
def test_models(
    module: Any, make: Any, products: int, by_channel: int, mode: str, tmp_path: Path
) -> None:
    model = lowered(module(), make)
    assert bool(model(make(1)).isnan().any()) is (module is block)
    path = tmp_path / "model.pt2" if mode == "package" else None
    assert_same(qompose.compile_lowered(model, mode, path=path), model, make)
    if path is not None:
        loaded = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        assert loaded.get_metadata()[native_calls.METADATA] == processor.of_machine().name
        code = source(path)
        calls = [code.count(f"aoti_torch_{name}") for name in (PRODUCT, DEPTHWISE, ONEDNN)]
        assert calls[:2] == [products + 1, by_channel + 1]  # and a declaration of each
        assert calls[2] == 0
        assert ("aoti_torch_cpu_quantize_planes(buf" in code or "quantize_planes(arg" in code) is (
            module is block
        )


@pytest.mark.full
def test_groups_of_any_number_of_channels(tmp_path: Path) -> None:
    """Few and many channels, more outputs than inputs, a last group beside whole ones, a sum behind it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.multiplied(m.stem(x))
        return torch.relu(x + m.narrow(x)) + m.wide(F.hardswish(m.split(x)))

    layers = {
        "stem": nn.Conv2d(3, 9, 3),
        "multiplied": nn.Conv2d(9, 72, 3, 2, 1, groups=9),
        "narrow": nn.Conv2d(72, 72, 3, 1, 1, groups=18),
        "split": nn.Conv2d(72, 40, 1, groups=2),
        "wide": nn.Conv2d(40, 72, (1, 3), padding=(0, 2), dilation=(1, 2), groups=2),
    }
    model = lowered(Model(forward, **layers), image)
    path = tmp_path / "model.pt2"
    assert_same(qompose.compile_lowered(model, "package", path=path), model, image)
    code = source(path)
    assert code.count(f"aoti_torch_{PRODUCT}") == 1 + len(layers)
    assert "aoti_torch_cpu__qconv" not in code


def test_nothing_is_asked_of_the_compiler_without_products() -> None:
    assert native_calls.options(torch.fx.symbolic_trace(nn.ReLU())) == {}
    weights = native_calls.options(lowered(nn.Linear(26, 4), image, weight_only=True))
    assert list(weights["aot_inductor.custom_ops_to_c_shims"]) == [
        linear_packed.OPERATOR,
        linear_packed.SEVERAL,
    ]


def test_only_what_is_needed_is_compiled() -> None:
    """Compilers take most of their time for the functions behind products, and for other layers."""

    def text(*layers: nn.Module) -> str:
        chosen = native_calls.options(lowered(nn.Sequential(*layers), image))
        return chosen["aot_inductor.custom_ops_to_c_shims"][products.PRODUCT][0]

    plain = text(nn.Linear(26, 26), nn.ReLU(), nn.Linear(26, 4))
    assert "QOMPOSE_FUNCTIONS 1\n" in plain
    assert "QOMPOSE_PRODUCTS_ALONE" in plain
    functions = text(nn.Linear(26, 26), nn.Hardswish(), nn.Linear(26, 26), nn.LeakyReLU())
    number = 1 | sum(1 << FUNCTIONS.index((name, "none")) for name in ("hardswish", "leaky_relu"))
    assert f"QOMPOSE_FUNCTIONS {number}\n" in functions


def test_a_weight_that_is_used_twice_is_packed_once() -> None:
    twice = Model(lambda m, x: m.shared(torch.relu(m.shared(x))), shared=nn.Linear(26, 26))
    model = with_prepack_in_graph(lowered(twice, image))
    calls = [node for node in model.graph.nodes if products.PRODUCT in node.args]
    assert len(calls) == 2
    assert len({node.args[2].target for node in calls}) == 1
    assert len({node.args[4].target for node in calls}) == 2  # the scales of the two inputs differ


def test_a_weight_is_packed_for_each_way_that_it_is_used() -> None:
    """Side by side, with gaps between the columns, and channel by channel."""

    def ways(m: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, m.weight, padding=1) + F.conv2d(x, m.weight, padding=2, dilation=2)
        return F.conv2d(y.relu(), m.weight, groups=20)

    module = Model(ways, weight=nn.Parameter(torch.randn(20, 1, 3, 3)))
    model = with_prepack_in_graph(lowered(module, lambda batch: torch.randn(batch, 1, 8, 8)))
    assert (
        len({n.args[2].target for n in model.graph.nodes if n.target is native_calls._image}) == 3
    )


@pytest.mark.parametrize(("few", "many"), [(1, 2), (4, 8)])
def test_a_weight_is_packed_for_each_number_of_groups(few: int, many: int) -> None:
    """Between whose groups other zeros stand."""

    def both(m: Any, x: Tensor) -> Tensor:
        return F.conv2d(x, m.weight, groups=many) + F.conv2d(x[:, : 8 * few], m.weight, groups=few)

    module = Model(both, weight=nn.Parameter(torch.randn(8 * few, 8, 1, 1)))
    lowered_for_both = lowered(module, lambda batch: torch.randn(batch, 8 * many, 5, 5))
    calls = with_prepack_in_graph(lowered_for_both).graph.nodes
    assert len({n.args[2].target for n in calls if n.target is native_calls._image}) == 2


def test_images_of_a_program_without_products_are_inductors() -> None:
    """The code for planes comes with that of products: a package without them could not hold it."""
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor
    quantized = Model(lambda m, x: quantize(x, 0.1, 128, 0, 255, torch.uint8))
    graph = torch.export.export(quantized, (image(2),)).module()
    assert with_prepack_in_graph(graph).code == graph.code


@pytest.mark.full
def test_a_float_of_a_linear_that_is_not_finite_stays_so() -> None:
    """As one of a convolution does, in `block`."""
    module = nn.Linear(6, 3)
    torch.nn.init.constant_(module.bias, float("nan"))
    make = lambda batch: torch.randn(batch, 6)  # noqa: E731
    model = lowered(module, make)
    compiled = qompose.compile_lowered(model)
    assert model(make(2)).isnan().all()
    assert compiled(make(2)).isnan().all()


def small() -> GraphModule:
    return lowered(nn.Sequential(nn.Linear(26, 8), nn.ReLU(), nn.Linear(8, 4)), image)


@pytest.mark.parametrize("mode", ["default", pytest.param("package", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "broken",
    [
        {products.PRODUCT: ["AOTITorchError aoti_torch_cpu_native_product(int, wrong)"]},
        pytest.param({products.PRODUCT: ["this is not C++"]}, marks=pytest.mark.full),
    ],
    ids=["another signature", "not C++"],
)
def test_code_that_does_not_compile_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, broken: dict[Any, list[str]], mode: str
) -> None:
    monkeypatch.setattr(products, "shims", lambda *_, **__: broken)
    model = small()
    with pytest.warns(qompose.QomposeWarning, match=r"error: .*QOMPOSE_NATIVE_CODE=0") as said:
        compiled = qompose.compile_lowered(model, mode)
    assert len(said) == 1
    assert_same(compiled, model, image)


@pytest.mark.full
def test_an_option_that_torch_has_not_got_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_calls, "_OPTION", "aot_inductor.code_of_our_own")
    model = small()
    with pytest.warns(qompose.QomposeWarning, match="code_of_our_own"):
        compiled = qompose.compile_lowered(model)
    assert_same(compiled, model, image)


def test_a_backend_without_it_leaves_products_to_onednn() -> None:
    plain = X86InductorBackend().without_native_code()
    assert plain is not None
    graph = small()
    assert not native_calls.options(graph).keys() & plain.compiler_options(graph).keys()
    assert not any(products.PRODUCT in node.args for node in plain.for_compiler(graph).graph.nodes)
    assert plain.without_native_code() is None


def test_weights_that_are_not_multiplied_exactly_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, wide = a_call(Output()), WEIGHT - 66
    for isa in (processor.AVX2, processor.AVX512_VNNI):
        monkeypatch.setattr(processor, "isa", lambda isa=isa: isa)
        assert native_calls.applies(call, WEIGHT)
        assert native_calls.applies(call, wide) is isa.multiplies_bytes


@pytest.mark.parametrize("post_op", [*POST_OPS, "mish"])
def test_a_function_that_it_has_not_got_is_left_to_onednn(post_op: str) -> None:
    """It must not be left out."""
    call = a_call(Output(post_op=post_op, args=(0.1, 0.2)))
    assert native_calls.applies(call, WEIGHT) == (post_op != "mish")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_types_that_it_has_not_got_are_left_to_onednn(dtype: torch.dtype) -> None:
    call = a_call(Output())
    summand = Summand(a_node(torch.ones(2, 3, dtype=dtype)))
    assert native_calls.applies(call, WEIGHT)
    assert not native_calls.applies(call._replace(summand=summand), WEIGHT)
    assert not native_calls.applies(call._replace(out=Output(dtype=dtype)), WEIGHT)


WEIGHT = torch.ones(3, 4).char()


def a_node(value: Tensor) -> Any:
    node = torch.fx.Graph().placeholder("x")
    node.meta["val"] = value
    return node


def a_call(out: Output) -> ProductCall:
    x: Any = a_node(torch.ones(2, 4, dtype=torch.uint8))
    return ProductCall("linear", Product(x, 1.0, 0, WEIGHT, torch.ones(3), None), out)
