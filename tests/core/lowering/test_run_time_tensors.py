# SPDX-License-Identifier: Apache-2.0
"""What is quantized when the model runs: per tensor, token or item, and how kernels are told of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import DynamicTensor, Kernel, NotLowerable, Pattern, Region
from qompose.errors import ConfigError
from qompose.observers import PerBlockMinMaxObserver
from qompose.spec.quantization_spec import granularity
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional

from tests.core.toy import (
    CONV_PATTERN,
    DYNAMIC,
    LINEAR_PATTERN,
    RUN_TIME,
    STATIC,
    WEIGHT,
    Model,
    aten,
    convert,
    export,
    nodes_calling,
    randn,
    rule,
    seeded,
    sqnr,
    toy,
)

PER_TOKEN = replace(RUN_TIME, qscheme=torch.per_channel_affine, block_size=(-1,))
PER_IMAGE = replace(PER_TOKEN, block_size=(-1, -1, -1))
TOKENS = replace(DYNAMIC, input_activation=PER_TOKEN, name="per token")
GROUPS = replace(
    WEIGHT, quant_min=-8, quant_max=7, block_size=(4,), ch_axis=None,
    observer_or_fake_quant_ctr=PerBlockMinMaxObserver,
)  # fmt: skip
IMAGES = {"activation": {"block_size": (-1, -1, -1)}}
TRANSPOSED = Pattern(
    lambda input, weight, bias: functional.conv_transpose2d(input, weight, bias),
    ((1, 2, 5, 5), (2, 2, 3, 3), (2,)),
    (("op", aten.conv_transpose2d.input),),
)


def product(name: str, pattern: Pattern, **facts: Any) -> Any:
    modes = frozenset({"dynamic"})
    return rule(name, pattern, anchor="op", weight="weight", output=False, modes=modes, **facts)


def seen_by_kernel(model: nn.Module, row: Any, config: Any, x: Tensor, role: str = "input") -> Any:
    """What the kernel of a row is told of a role's tensor; the kernel leaves its region alone."""
    told: list[Any] = []

    def look(region: Region) -> Node:
        told.append(region.dynamic(role) if role == "input" else region.quantized(role))
        raise NotLowerable("it only looks")

    looking = replace(row, kernels={"torch": Kernel("kernel", look, float_output=True)})
    converted = convert(export(model, x), toy(looking, config=config), x)
    with pytest.warns(qompose.QomposeWarning, match="it only looks"):
        qompose.lower(converted)
    return told[0]


LINEAR = product("linear", LINEAR_PATTERN)
IMAGE_CONV = product("conv2d", CONV_PATTERN, layout=IMAGES)


class TestItems:
    def test_one_scale_for_each_image(self) -> None:
        """What is quantized of an image does not depend on the images beside it."""
        model = seeded(nn.Conv2d(2, 3, 3))
        images = randn(3, 2, 6, 6) * torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1, 1)
        program = export(model, images, dynamic_shapes=({0: torch.export.Dim("batch")},))
        converted = convert(program, toy(IMAGE_CONV, config=TOKENS), images)
        alone = torch.cat([converted(image[None]) for image in images])
        for one, other in zip(converted(images).detach(), alone.detach(), strict=True):
            # A batch may be added up in another order than an image.
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
        assert min(sqnr(model(x[None]), y[None]) for x, y in zip(images, alone, strict=True)) > 30

    def test_an_image_without_a_batch(self) -> None:
        model, image = seeded(nn.Conv2d(2, 3, 3)), randn(2, 6, 6)
        converted = convert(export(model, image), toy(IMAGE_CONV, config=TOKENS), image)
        assert sqnr(model(image), converted(image)) > 30

    @pytest.mark.parametrize("blocks", [(2,), (-1, 4), (1, -1)])
    def test_other_blocks_are_refused(self, blocks: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match=r"\(-1, -1, -1\)"):
            replace(PER_TOKEN, block_size=blocks)

    def test_their_granularity_has_a_name(self) -> None:
        assert [granularity(s) for s in (RUN_TIME, WEIGHT, PER_TOKEN, PER_IMAGE, GROUPS, None)] == [
            "per-tensor", "per-channel", "per-token", "per-item", "per-block (4,)", ""
        ]  # fmt: skip


class TestWhatKernelsSee:
    @pytest.mark.parametrize(
        ("config", "dims", "symmetric"),
        [
            (DYNAMIC, None, False),
            (TOKENS, 1, False),
            (replace(TOKENS, input_activation=replace(
                PER_TOKEN, qscheme=torch.per_channel_symmetric)), 1, True),
        ],
        ids=["per tensor", "per token", "per token, symmetric"],
    )  # fmt: skip
    def test_floats_and_what_shares_a_scale(self, config: Any, dims: Any, symmetric: bool) -> None:
        tensor = seen_by_kernel(seeded(nn.Linear(8, 4)), LINEAR, config, randn(3, 8))
        eps = torch.finfo(torch.float32).eps if dims is None else None
        expected = DynamicTensor(tensor.node, dims, symmetric, -128, 127, torch.int8, eps)
        assert tensor == expected
        assert tensor.node.op == "placeholder"

    def test_images(self) -> None:
        model = seeded(nn.Sequential(nn.Sigmoid(), nn.Conv2d(2, 3, 3)))
        tensor = seen_by_kernel(model, IMAGE_CONV, TOKENS, randn(3, 2, 6, 6))
        assert (tensor.node.target, tensor.dims) == (aten.sigmoid.default, 3)

    @pytest.mark.parametrize("config", [DYNAMIC, TOKENS], ids=["per tensor", "per token"])
    def test_halves_and_not_the_cast_that_their_range_is_of(self, config: Any) -> None:
        model, x = seeded(nn.Linear(8, 4)).half(), randn(3, 8).half()
        tensor = seen_by_kernel(model, LINEAR, config, x)
        assert (tensor.node.op, tensor.node.meta["val"].dtype) == ("placeholder", torch.float16)

    def test_groups_of_a_weight(self) -> None:
        model = seeded(nn.Linear(8, 4))
        config = replace(TOKENS, weight=GROUPS)
        weight = seen_by_kernel(model, LINEAR, config, randn(3, 8), "weight")
        assert (weight.group, weight.axis, weight.scales.shape) == (4, None, (4, 2))
        assert (weight.low, weight.high) == (-8, 7)

    def test_a_tensor_whose_scale_is_known_is_not_dynamic(self) -> None:
        refused: list[str] = []

        def kernel(region: Region) -> Node:
            try:
                region.dynamic("input")
            except NotLowerable as reason:
                refused.append(str(reason))
            raise NotLowerable("it only looks")

        static = rule("linear", LINEAR_PATTERN, anchor="op", weight="weight",
                      kernels={"torch": Kernel("kernel", kernel)})  # fmt: skip
        x = randn(3, 8)
        converted = convert(export(seeded(nn.Linear(8, 4)), x), toy(static, config=STATIC), x)
        with pytest.warns(qompose.QomposeWarning, match="it only looks"):
            qompose.lower(converted)
        assert refused


class TestLayout:
    ROW = product("transposed", TRANSPOSED, layout={"weight": {"ch_axis": 1}, **IMAGES})

    def test_a_configuration_is_laid_out_for_the_operator(self) -> None:
        """Output channels of a transposed convolution are along dimension 1 of its weight."""
        model = seeded(nn.ConvTranspose2d(2, 5, 3))
        weight = seen_by_kernel(model, self.ROW, TOKENS, randn(3, 2, 6, 6), "weight")
        assert (weight.axis, weight.scales.shape) == (1, (5,))

    def test_only_what_a_specification_has_is_laid_out(self) -> None:
        specs = self.ROW.specs_for(replace(DYNAMIC, weight=replace(
            WEIGHT, qscheme=torch.per_tensor_symmetric, ch_axis=None)))  # fmt: skip
        assert (specs["activation"].block_size, specs["weight"].ch_axis) == (None, None)

    def test_words_that_nothing_reads_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="'axis'"):
            product("linear", LINEAR_PATTERN, layout={"weight": {"axis": 1}})


CHOOSE = torch.ops.quantized_decomposed.choose_qparams.tensor
QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.tensor


@torch.library.custom_op("qompose_run_time_tests::linear", mutates_args=())
def run_time_linear(
    x: Tensor, scale: Tensor, zero: Tensor, weight: Tensor, scales: Tensor, bias: Tensor
) -> Tensor:
    return functional.linear((x.float() - zero) * scale.float(), weight * scales[:, None], bias)


@run_time_linear.register_fake
def _(x, scale, zero, weight, scales, bias) -> Tensor:  # type: ignore[no-untyped-def]
    return bias.new_empty((*x.shape[:-1], weight.shape[0]))


Step = Callable[..., Node]


def emit_with(step: Callable[[Region], Step]) -> Callable[[Region], Node]:
    """The kernel that quantizes its input by such steps."""

    def emit(region: Region) -> Node:
        source, weight, insert = region.dynamic("input"), region.quantized("weight"), step(region)
        bounds = (source.low, source.high)
        chosen = insert(CHOOSE, source.node, *bounds, source.eps, source.dtype)
        scale, zero = (insert(operator.getitem, chosen, place) for place in (0, 1))
        integers = insert(QUANTIZE, source.node, scale, zero, *bounds, source.dtype)
        bias = region.argument("op", "bias")
        return region.call(run_time_linear, integers, scale, zero, weight.node, weight.scale, bias)

    return emit


def shared(region: Region) -> Step:
    return lambda *call: region.shared_step("input", *call)


def lowered_by(
    step: Callable[[Region], Step], model: nn.Module, quantizer: Any = None
) -> tuple[Any, Any]:
    """A model whose linears quantize by such steps, and its converted form."""
    row = replace(LINEAR, kernels={"torch": Kernel("k", emit_with(step), float_output=True)})
    quantizer = toy(row, config=DYNAMIC) if quantizer is None else quantizer(row)
    converted = convert(export(model, X), quantizer, X)
    return qompose.lower(converted), converted


X = randn(5, 8)
LAYERS = {name: nn.Linear(8, 8) for name in ("a", "b", "c")}
THREE = seeded(Model(lambda m, x: (m.c(x.sigmoid()), m.a(x), m.b(x), m.c(x)), **LAYERS))


class TestSharedSteps:
    def test_products_of_one_tensor_read_one_quantization(self) -> None:
        """The others have their own; and every bit is that of kernels that quantize for themselves."""
        together, converted = lowered_by(shared, THREE)
        apart, _ = lowered_by(lambda region: region.step, THREE)
        for name in ("choose_qparams", "quantize_per_tensor"):
            assert len(nodes_calling(together, name)) == 2
            assert len(nodes_calling(apart, name)) == 4
        for given in (X, randn(5, 8, seed=1)):
            assert all(map(torch.equal, together(given), apart(given)))
            assert min(map(sqnr, converted(given), together(given))) > 100

    def test_with_other_integers_they_have_their_own(self) -> None:
        fewer = replace(DYNAMIC, input_activation=replace(RUN_TIME, quant_min=-64, quant_max=63))
        together, converted = lowered_by(
            shared, THREE, lambda row: toy(row, config=DYNAMIC).set_module_name("b", fewer)
        )
        assert len(nodes_calling(together, "choose_qparams")) == 3
        assert min(map(sqnr, converted(X), together(X))) > 100

    def test_a_tensor_that_is_written_to_between_is_quantized_before_and_after(self) -> None:
        model = seeded(Model(lambda m, x: (m.a(y := x.exp()), m.b(y.neg_())), **LAYERS))
        together, converted = lowered_by(shared, model)
        assert len(nodes_calling(together, "choose_qparams")) == 2
        assert min(map(sqnr, converted(X), together(X))) > 100

    def test_the_same_tensor_in_every_call_in_a_part_that_is_exported_again(self) -> None:
        """As the state that recurrent layers begin with: integers in a buffer would stand before it."""
        model = seeded(Model(lambda m, x: m.a(x) + m.b(torch.ones(5, 8)), **LAYERS))
        _, part = lowered_by(shared, model)
        whole = export(Model(lambda m, x: m.part(x).tanh(), part=part), X, strict=True)
        row = replace(LINEAR, kernels={"torch": Kernel("k", emit_with(shared), float_output=True)})
        lowered = qompose.lower(convert(whole, toy(row, config=DYNAMIC), X))
        kernels = run_time_linear._opoverload
        assert sum(node.target is kernels for node in lowered.graph.nodes) == 2
        assert sqnr(part(X).tanh(), lowered(X)) > 100

    def test_a_step_that_reads_what_comes_later_is_refused(self) -> None:
        def late(region: Region) -> Step:
            after = region.step(aten.neg.default, region.dynamic("input").node)
            return lambda target, source, *rest: region.shared_step("input", target, after, *rest)

        with pytest.raises(ConfigError, match="rule linear, at linear calls"):
            lowered_by(late, THREE)

    def test_and_so_is_a_tensor_that_is_not_quantized_when_the_model_runs(self) -> None:
        def static(region: Region) -> Node:
            return region.shared_step("input", aten.neg.default, region.inputs("input")[0])

        row = rule("linear", LINEAR_PATTERN, anchor="op", weight="weight",
                   kernels={"torch": Kernel("k", static)})  # fmt: skip
        converted = convert(export(seeded(nn.Linear(8, 4)), X), toy(row, config=STATIC), X)
        with pytest.warns(qompose.QomposeWarning, match="static"):
            qompose.lower(converted)


def test_scales_in_fewer_bits() -> None:
    spec = replace(GROUPS, observer_or_fake_quant_ctr=PerBlockMinMaxObserver.with_args(
        scale_dtype=torch.bfloat16))  # fmt: skip
    config, model, x = replace(TOKENS, weight=spec), seeded(nn.Linear(8, 4)), randn(3, 8)
    converted = convert(export(model, x), toy(LINEAR, config=config), x)
    scales = dict(converted.named_buffers())["weight_scale"]
    assert scales.dtype is torch.float32
    assert torch.equal(scales, scales.bfloat16().float())
    assert qompose.observers.spec_from_json(qompose.observers.spec_to_json(spec)) == spec
    with pytest.raises(ConfigError, match="scale_dtype"):
        PerBlockMinMaxObserver(torch.int8, (4,), scale_dtype=torch.int8)


def test_the_only_block_sizes() -> None:
    constraint = qompose.backend.TensorConstraint(
        dtypes={torch.int8}, qschemes={torch.per_channel_symmetric}, block_sizes={(32,), (4,)}
    )
    assert constraint.objection("weight", GROUPS) is None
    for wrong in (WEIGHT, replace(GROUPS, block_size=(8,))):
        assert "(4,) or (32,)" in (constraint.objection("weight", wrong) or "")
    assert "(4,) or (32,)" in constraint.describe()
