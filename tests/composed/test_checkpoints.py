# SPDX-License-Identifier: Apache-2.0
"""A language model from a checkpoint of GPTQ, AWQ or compressed-tensors has its integers in every stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.algorithms import (
    Algorithm,
    Calibrated,
    Checkpoint,
    Operands,
    change_products,
    set_integers,
    weight_of,
)
from qompose.errors import CheckpointError, ConfigError
from qompose.spec.claim import Claim
from qompose.testing.fixtures import sqnr
from qompose_onnx import ONNXQuantizer, get_onnx_quantization_config as onnx
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as x86,
)
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config as xnnpack
from torch import Tensor, nn

from tests.core.algorithms.packed import (
    LAYOUTS,
    Held,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    held,
    write,
)
from tests.sampling import at_once

transformers = pytest.importorskip("transformers")

SAME = 110.0
"""dB between what should differ by the order of float32 sums alone."""
IDS = torch.randint(64, (1, 7), generator=torch.Generator().manual_seed(0))


class Logits(nn.Module):
    """What is exported: the model inside has longer names than in its checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=ids, use_cache=False).logits
        return logits


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            yield name, module


def checkpoint_of(
    path: Path, layout: str = "gptq", **options: Any
) -> tuple[Checkpoint, dict[str, Held]]:
    """Write a checkpoint of a Llama whose layers are quantized, with the values that it has to give."""
    model, (pack, config) = llama(), LAYOUTS[layout]
    found = {
        name: held(*module.weight.shape, seed=n, **options)
        for n, (name, module) in enumerate(linears(model))
    }
    floats = {n: v for n, v in model.state_dict().items() if n.rpartition(".")[0] not in found}
    write(path, config, {n: pack(w) for n, w in found.items()}, floats, files=2)
    return Checkpoint(str(path)), found


def exported(checkpoint: Checkpoint) -> torch.export.ExportedProgram:
    model = llama()
    checkpoint.load_into(model)
    return torch.export.export(Logits(model), (IDS,), strict=False)


def quantizer_of(checkpoint: Checkpoint, **other: Any) -> Any:
    config = x86(weight_only=True, **{**checkpoint.options(), **other})
    return X86InductorQuantizer().set_filter(checkpoint.holds, config)


def converted_of(checkpoint: Checkpoint, quantizer: Any) -> Any:
    return qompose.convert_pt2e(qompose.prepare_pt2e(exported(checkpoint), quantizer))


@pytest.mark.parametrize(
    ("layout", "symmetric"),
    at_once(
        itertools.product(LAYOUTS, (True, False)),
        *(("gptq", True), ("gptq_v2", False), ("awq", False), ("compressed-tensors", True)),
    ),
)
def test_integers_scales_and_zero_points_are_the_checkpoints(
    layout: str, symmetric: bool, tmp_path: Path
) -> None:
    checkpoint, weights = checkpoint_of(tmp_path / "held", layout, symmetric=symmetric)
    program = exported(checkpoint)
    expected = program.module()(IDS)
    prepared = qompose.prepare_pt2e(program, quantizer_of(checkpoint))
    converted = qompose.convert_pt2e(prepared)
    state = converted.state_dict()
    for name, weight in weights.items():
        path = f"inner.{name}.weight"
        assert torch.equal(state[f"{path}_q"], weight.signed)
        assert torch.equal(state[f"{path}_scale"], weight.scale.float())
        if not symmetric:
            assert torch.equal(state[f"{path}_zero_point"].long(), weight.zeros - 8)
    assert torch.equal(converted(IDS), expected)  # the same weights, and all else in float

    lowered = qompose.lower(converted)
    qompose.save(lowered, tmp_path / "model.qompose")
    loaded = qompose.load(tmp_path / "model.qompose")
    assert sqnr(expected, loaded(IDS)) > SAME
    assert torch.equal(loaded(IDS), lowered(IDS))
    report = qompose.report(lowered)
    assert sum(line.startswith("checkpoint held on ") for line in report.rewrites) == len(weights)
    assert report.why(f"inner.{next(iter(weights))}")[0].kernel == "qompose_x86.linear_packed"


def test_the_folder_is_not_needed_once_it_is_converted(tmp_path: Path) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "held")
    converted = converted_of(checkpoint, quantizer_of(checkpoint))
    (tmp_path / "held").rename(tmp_path / "gone")
    qompose.save(converted, tmp_path / "model.qompose")
    loaded = qompose.load(tmp_path / "model.qompose")
    assert torch.equal(loaded(IDS), converted(IDS))
    assert "checkpoint held" in str(qompose.report(loaded).to_dict())


def test_smaller_groups_repeat_scales(tmp_path: Path) -> None:
    """A backend whose weights have zero points in groups alone keeps those of whole rows."""
    found = {n: held(*m.weight.shape, seed=1, size=None) for n, m in linears(llama())}
    floats = {n: v for n, v in llama().state_dict().items() if n.rpartition(".")[0] not in found}
    path = write(
        tmp_path, gptq_config(group_size=-1), {n: gptq(w) for n, w in found.items()}, floats
    )
    checkpoint = Checkpoint(str(path))
    program = exported(checkpoint)
    assert checkpoint.options()["group_size"] == 64  # of rows of 64 and 128
    config = x86(weight_only=True, **checkpoint.options(group_size=32))
    quantizer = X86InductorQuantizer().set_filter(checkpoint.holds, config)
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
    assert torch.equal(converted(IDS), program.module()(IDS))


def test_another_backend_keeps_what_it_can(tmp_path: Path) -> None:
    """XNNPACK's groups are symmetric, with scales in bfloat16."""
    found = {
        n: held(*m.weight.shape, seed=1, symmetric=True, dtype=torch.bfloat16)
        for n, m in linears(llama())
    }
    floats = {n: v for n, v in llama().state_dict().items() if n.rpartition(".")[0] not in found}
    tensors = {n: compressed(w) for n, w in found.items()}
    checkpoint = Checkpoint(str(write(tmp_path, compressed_config(), tensors, floats)))
    program = exported(checkpoint)
    config = xnnpack(weight_only=True, **checkpoint.options())
    quantizer = XNNPACKQuantizer().set_filter(checkpoint.holds, config)
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
    assert torch.equal(converted(IDS), program.module()(IDS))
    assert sqnr(converted(IDS), qompose.lower(converted)(IDS)) > SAME


def test_another_backend_refuses_what_it_lacks(tmp_path: Path) -> None:
    """Zero points, and scales that bfloat16 would round."""
    for symmetric, named in ((False, "symmetric=False"), (True, "scale_dtype")):
        checkpoint, _ = checkpoint_of(tmp_path / named, symmetric=symmetric)
        with pytest.raises(ConfigError, match=named):
            xnnpack(weight_only=True, **checkpoint.options())


@pytest.mark.parametrize("symmetric", at_once([True, False], False))
def test_onnx_runtime_computes_with_them(symmetric: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    checkpoint, _ = checkpoint_of(tmp_path, symmetric=symmetric)
    program = exported(checkpoint)
    config = onnx(weight_only=True, **checkpoint.options())
    quantizer = ONNXQuantizer().set_filter(checkpoint.holds, config)
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
    expected = program.module()(IDS)
    assert torch.equal(converted(IDS), expected)
    assert sqnr(expected, qompose.lower(converted, target="onnx")(IDS)) > SAME


class Again(Algorithm):
    """Rounds every weight to zero."""

    word = "again"

    def correct(self, found: Calibrated) -> None:
        def change(product: Operands, claim: Claim) -> str:
            set_integers(found, product, weight_of(found, product).mul(0).to(torch.int8))
            return "zero"

        change_products(found, self, change)


NOT_KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero points where there are none": ({}, {"symmetric": True}),
    "scales that would be rounded": ({}, {"scale_dtype": torch.bfloat16}),
    "larger groups": ({"symmetric": True}, {"group_size": 64}),
    "fewer bits": ({}, {"weight_qmin": -4, "weight_qmax": 3}),
    "a scale by row": (
        {"symmetric": True}, {"group_size": None, "scale_dtype": None, "symmetric": None},
    ),
    "rounded again": (
        {}, {"algorithms": lambda checkpoint: (Again(), checkpoint)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_KEPT)
def test_a_configuration_that_cannot_hold_a_weight_is_refused(case: str, tmp_path: Path) -> None:
    options, other = NOT_KEPT[case]
    checkpoint, weights = checkpoint_of(tmp_path, **options)
    given = {n: v(checkpoint) if callable(v) else v for n, v in other.items()}
    prepared = qompose.prepare_pt2e(exported(checkpoint), quantizer_of(checkpoint, **given))
    prepared(IDS)
    with pytest.raises(CheckpointError) as caught:
        qompose.convert_pt2e(prepared)
    assert caught.value.names[0] in weights


def test_other_weights_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    """Those of a model that nothing was loaded into, and of a linear that the checkpoint has in float."""
    checkpoint, weights = checkpoint_of(tmp_path)
    program = torch.export.export(Logits(llama()), (IDS,), strict=False)
    prepared = qompose.prepare_pt2e(program, quantizer_of(checkpoint))
    with pytest.raises(CheckpointError) as caught:
        qompose.convert_pt2e(prepared)
    assert caught.value.names[0] in weights
    quantizer = X86InductorQuantizer().set_global(x86(weight_only=True, **checkpoint.options()))
    with pytest.raises(CheckpointError) as caught:
        converted_of(checkpoint, quantizer)
    assert caught.value.names == ("inner.lm_head.weight",)


def test_weights_that_another_configuration_takes_are_reported(tmp_path: Path) -> None:
    checkpoint, weights = checkpoint_of(tmp_path)
    name = next(iter(weights))
    converted = converted_of(
        checkpoint, quantizer_of(checkpoint).set_module_name(f"inner.{name}", None)
    )
    notes = qompose.report(converted).notes
    assert [
        line for line in notes if line.startswith("checkpoint was not applied") and name in line
    ]


def test_methods_and_quantized_rows_have_them_too(tmp_path: Path) -> None:
    """A prompt and a token of one program, with activations of eight bits."""
    checkpoint, weights = checkpoint_of(tmp_path)
    model = llama()
    checkpoint.load_into(model)
    programs = {
        name: torch.export.export(Logits(model), (IDS[:, :size],), strict=False)
        for name, size in (("prompt", 7), ("token", 1))
    }
    config = x86(is_dynamic=True, per_token=True, **checkpoint.options())
    quantizer = X86InductorQuantizer().set_filter(checkpoint.holds, config)
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(programs, quantizer))
    for name, weight in weights.items():
        both = [m.state_dict()[f"inner.{name}.weight_q"] for m in converted.values()]
        assert all(torch.equal(integers, weight.signed) for integers in both)
        assert both[0].data_ptr() == both[1].data_ptr()
    lowered = qompose.lower(converted)
    assert sqnr(converted["token"](IDS[:, :1]), lowered["token"](IDS[:, :1])) > 60


def test_types_of_scales_that_kernels_do_not_read_are_refused() -> None:
    with pytest.raises(ConfigError):
        x86(weight_only=True, group_size=32, scale_dtype=torch.float16)
    with pytest.raises(ConfigError):
        x86(weight_only=True, scale_dtype=torch.float32)
