# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are read as they were written, fill a model whole or not at all, and refuse by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qompose import QuantizationConfig
from qompose.algorithms import Checkpoint
from qompose.backend import kit
from qompose.errors import CheckpointError
from qompose.observers import config_from_json, config_to_json
from torch import Tensor, nn

from tests.core.algorithms.packed import (
    LAYOUTS,
    Pack,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    held,
    write,
)


class Net(nn.Module):
    """Two linears that are quantized, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 96, bias=False)
        self.head = nn.Linear(96, 8)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x).relu()))
        return result


SHAPES = {"first": (32, 64), "second": (96, 32)}
FLOATS = ("first.bias", "head.weight", "head.bias", "count")


def weights(**options: Any) -> dict[str, Any]:
    return {name: held(*shape, seed=n, **options) for n, (name, shape) in enumerate(SHAPES.items())}


def floats() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = Net().state_dict()
    return {name: state[name] + 1 for name in FLOATS}


def folder_of(path: Path, layout: str = "gptq", **options: Any) -> Path:
    pack, config = LAYOUTS[layout]
    return write(path, config, {n: pack(w) for n, w in weights().items()}, floats(), **options)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_filled_with_what_the_integers_stand_for(
    layout: str, files: int, tmp_path: Path
) -> None:
    checkpoint, model = Checkpoint(str(folder_of(tmp_path, layout, files=files))), Net()
    checkpoint.load_into(model)
    assert checkpoint.modules == {*SHAPES}
    for name, weight in weights().items():
        assert torch.equal(model.get_submodule(name).weight, weight.values)
        found = checkpoint.weight(name)
        assert torch.equal(found.integers, weight.signed)
        assert torch.equal(found.scale, weight.scale.float())
        assert torch.equal(found.zero_point, weight.zeros - 8)
        assert (found.bits, found.group_size) == (4, 32)
    for name, value in floats().items():
        assert torch.equal(model.state_dict()[name], value)


Case = tuple[Callable[..., dict[str, Tensor]], dict[str, Any], dict[str, Any]]
BITS: dict[str, Case] = {
    "gptq of 8 bits in groups": (gptq, gptq_config(bits=8), {"bits": 8}),
    "gptq of 2 bits": (gptq, gptq_config(bits=2), {"bits": 2}),
    "gptq of 8 bits by row": (
        gptq, gptq_config(bits=8, group_size=-1), {"bits": 8, "size": None, "symmetric": True},
    ),
    "awq by row": (awq, awq_config(group_size=-1), {"size": None}),
    "compressed of 8 bits by row": (
        compressed,
        compressed_config({"num_bits": 8, "strategy": "channel", "group_size": None}),
        {"bits": 8, "size": None, "symmetric": True, "dtype": torch.bfloat16},
    ),
    "compressed in float32": (compressed, compressed_config(), {"dtype": torch.float32, "symmetric": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", BITS)
def test_other_bits_groups_and_scales(case: str, tmp_path: Path) -> None:
    pack, config, options = BITS[case]
    expected = weights(**options)
    path = write(tmp_path, config, {n: pack(w) for n, w in expected.items()}, floats())
    model = Net()
    Checkpoint(str(path)).load_into(model)
    for name, weight in expected.items():
        assert torch.equal(model.get_submodule(name).weight, weight.values)


def test_a_row_that_fills_no_word_whole(tmp_path: Path) -> None:
    """compressed-tensors pads the last word of a row, and the last of zero points."""
    weight = held(30, 52, size=26)
    config = compressed_config({"symmetric": False, "group_size": 26})
    path = write(tmp_path, config, {"linear": compressed(weight)})
    found = Checkpoint(str(path)).weight("linear")
    assert torch.equal(found.values(), weight.values)


@pytest.mark.parametrize("pack", [gptq, compressed])
def test_groups_in_another_order_are_put_right(pack: Any, tmp_path: Path) -> None:
    """static groups with act-order: each group's inputs lie together."""
    weight, order = held(16, 96), torch.tensor([2, 0, 1])
    stored = pack(weight, group_of_input=order.repeat_interleave(32))
    config = gptq_config() if pack is gptq else compressed_config({"actorder": "group"})
    found = Checkpoint(str(write(tmp_path, config, {"linear": stored}))).weight("linear")
    assert torch.equal(found.scale, weight.scale.float()[:, order])
    assert torch.equal(found.zero_point, weight.zeros[:, order] - 8)
    assert torch.equal(found.integers, weight.signed)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)  # fmt: skip
def test_configurations_of_their_own(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """As AutoGPTQ and AutoAWQ wrote them, beside one of the model; the file has a name of its own, too."""
    path = folder_of(tmp_path, "awq" if "w_bit" in config else "gptq")
    (path / "config.json").write_text("{}")
    (path / name).write_text(json.dumps(config))
    (path / "model.safetensors").rename(path / "gptq_model-4bit-32g.safetensors")
    checkpoint = Checkpoint(str(path))
    assert torch.equal(checkpoint.weight("first").values(), weights()["first"].values)


SCATTERED = torch.arange(64) % 2
NOT_READ: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = {
    "inputs of a group apart": (gptq_config(), lambda t: t.update(g_idx=SCATTERED), "first"),
    "a group that is not there": (
        gptq_config(), lambda t: t.update(g_idx=torch.arange(64) // 16), "first",
    ),
    "zero points that runtimes read differently": (
        gptq_config(), lambda t: t["qzeros"].fill_(-1), "first",
    ),
    "groups of another size": (gptq_config(group_size=16), lambda t: None, "first"),
    "a scale of 0": (gptq_config(), lambda t: t["scales"][0].zero_(), "first"),
    "words of 64 bits": (
        gptq_config(), lambda t: t.update(qweight=t["qweight"].long()), "first",
    ),
    "no scales": (gptq_config(), lambda t: t.pop("scales"), "first"),
    "an order in floats": (gptq_config(), lambda t: t.update(g_idx=t["g_idx"].double()), "first"),
    "zero points of the other format": (
        gptq_config(sym=True), lambda t: t["qzeros"].fill_(-0x77777778), "first",
    ),
}  # fmt: skip


def _named_and_nothing_written(folder: Path, name: str) -> None:
    model = Net()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(str(folder)).load_into(model)
    assert caught.value.names == (name,)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize("case", NOT_READ)
def test_a_weight_that_is_not_read_is_named(case: str, tmp_path: Path) -> None:
    config, change, name = NOT_READ[case]
    packed = {n: gptq(w) for n, w in weights().items()}
    change(packed[name])
    _named_and_nothing_written(write(tmp_path, config, packed, floats()), name)


CUT: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "a row of scales": lambda t: t.update(weight_scale=t["weight_scale"][:-1].clone()),
    "all rows of scales but one": lambda t: t.update(weight_scale=t["weight_scale"][:1].clone()),
    "all scales": lambda t: t.update(weight_scale=t["weight_scale"][:, :0].clone()),
    "scales of every second group": lambda t: t.update(weight_scale=t["weight_scale"][:, :1].clone()),
    "a shape in floats": lambda t: t.update(weight_shape=t["weight_shape"].double()),
}  # fmt: skip


@pytest.mark.parametrize("case", CUT)
def test_what_is_cut_short_is_named(case: str, tmp_path: Path) -> None:
    """Half of the scales are those of groups twice as large, which the configuration does not have."""
    packed = {n: compressed(w) for n, w in weights(symmetric=True).items()}
    CUT[case](packed["first"])
    folder = write(tmp_path, compressed_config(), packed, floats())
    _named_and_nothing_written(folder, "first")


LACKING: dict[str, tuple[Pack, dict[str, Any], str]] = {
    "gptq's order of inputs": (gptq, gptq_config(desc_act=True), "g_idx"),
    "compressed-tensors' order": (compressed, compressed_config({"actorder": "group"}), "weight_g_idx"),
    "zero points": (compressed, compressed_config({"symmetric": False}), "weight_zero_point"),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_a_tensor_that_the_configuration_promises_is_missed(case: str, tmp_path: Path) -> None:
    """Without it, groups would be read as consecutive inputs, and zero points as those in the middle."""
    pack, config, part = LACKING[case]
    packed = {n: pack(w) for n, w in weights().items()}
    for tensors in packed.values():
        tensors.pop(part, None)
    _named_and_nothing_written(write(tmp_path, config, packed, floats()), "first")


def test_one_group_of_all_inputs_has_no_order(tmp_path: Path) -> None:
    packed = {n: gptq(w) for n, w in weights(size=None).items()}
    for tensors in packed.values():
        del tensors["g_idx"]
    config = gptq_config(desc_act=True, group_size=-1)
    found = Checkpoint(str(write(tmp_path, config, packed))).weight("first")
    assert torch.equal(found.values(), weights(size=None)["first"].values)


REFUSED = {
    "bitsandbytes": {"quant_method": "bitsandbytes"},
    "marlin": gptq_config(checkpoint_format="marlin"),
    "three bits": gptq_config(bits=3),
    "other bits in places": gptq_config(dynamic={"+:.*down.*": {"bits": 8}}),
    "gemv": awq_config(version="gemv"),
    "without zero points": awq_config(zero_point=False),
    "nvfp4": compressed_config(format="nvfp4-pack-quantized"),
    "int-quantized": compressed_config({"num_bits": 8}, format="int-quantized"),
    "a cache": compressed_config(kv_cache_scheme={"num_bits": 8}),
    "floats": compressed_config({"type": "float"}),
    "blocks": compressed_config({"strategy": "block"}),
    "activations": compressed_config(
        config_groups={"group_0": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}
    ),
    "no groups": compressed_config(config_groups={}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_layouts_are_refused(case: str, tmp_path: Path) -> None:
    path = write(tmp_path, REFUSED[case], {"first": gptq(weights()["first"])})
    with pytest.raises(CheckpointError):
        Checkpoint(str(path)).modules  # noqa: B018


class Transposed(nn.Module):
    """A product whose weight may have the shape of a linear's, and other values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(96, 32))


def _model(change: Callable[[Net], None]) -> Net:
    model = Net()
    change(model)
    return model


MISPLACED: dict[str, tuple[Callable[[Net], Any], set[str]]] = {
    "no place": (lambda m: delattr(m, "head"), {"head.weight", "head.bias"}),
    "missing": (lambda m: setattr(m, "more", nn.Linear(2, 2)), {"more.weight", "more.bias"}),
    "another shape": (lambda m: setattr(m, "head", nn.Linear(9, 8)), {"head.weight"}),
    "no linear": (lambda m: setattr(m, "second", Transposed()), {"second"}),
    "meta": (
        lambda m: m.to("meta"), {"first.weight", "second.weight", *FLOATS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISPLACED)
def test_what_does_not_fit_a_model_is_named_and_nothing_written(case: str, tmp_path: Path) -> None:
    change, names = MISPLACED[case]
    model = _model(change)
    before = {n: v if v.is_meta else v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(str(folder_of(tmp_path))).load_into(model)
    assert set(caught.value.names) == names
    after = model.state_dict()
    assert all(v.is_meta or torch.equal(before[n], v) for n, v in after.items())


def test_tensors_can_be_left_out_by_name(tmp_path: Path) -> None:
    packed = {n: gptq(w) for n, w in weights().items()}
    extra = {"rotary.inv_freq": torch.ones(2)}
    checkpoint = Checkpoint(str(write(tmp_path, gptq_config(), packed, floats() | extra)))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(Net())
    assert caught.value.names == ("rotary.inv_freq",)
    checkpoint.load_into(Net(), ignore=["*.inv_freq"])
    smaller = Net()
    del smaller.second  # a module with integers, too
    checkpoint.load_into(smaller, ignore=["*.inv_freq", "second.*"])
    assert torch.equal(smaller.first.weight, weights()["first"].values)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(Net(), ignore=["*.inv_freq", "*.inv_frequency"])
    assert caught.value.names == ("*.inv_frequency",)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_only_a_bias_of_zeros_may_have_no_place(value: float, tmp_path: Path) -> None:
    packed = {n: gptq(w) for n, w in weights().items()}
    extra = {"second.bias": torch.full((96,), value)}
    checkpoint = Checkpoint(str(write(tmp_path, gptq_config(), packed, floats() | extra)))
    if value == 0:
        checkpoint.load_into(Net())
        return
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(Net())
    assert caught.value.names == ("second.bias",)


class Tied(nn.Module):
    """A linear with integers, and a table that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.head = nn.Linear(64, 32), nn.Embedding(8, 32), nn.Linear(32, 8)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("both", [None, 0.0, 1.0])
def test_what_a_model_shares_is_there_once(both: float | None, tmp_path: Path) -> None:
    """Or twice, and equal."""
    torch.manual_seed(0)
    stored = {n: v for n, v in Tied().state_dict().items() if n != "first.weight"}
    table = stored["table.weight"]
    stored.pop("head.weight")
    if both is not None:
        stored["head.weight"] = table + both
    packed = {"first": gptq(weights()["first"])}
    checkpoint, model = Checkpoint(str(write(tmp_path, gptq_config(), packed, stored))), Tied()
    if both == 1:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load_into(model)
        assert set(caught.value.names) & {"head.weight", "table.weight"}
        return
    checkpoint.load_into(model)
    assert torch.equal(model.head.weight, table)


def test_weights_are_stored_in_the_type_of_the_model(tmp_path: Path) -> None:
    model = Net().to(torch.bfloat16)
    Checkpoint(str(folder_of(tmp_path))).load_into(model)
    expected = weights()["first"].values.to(torch.bfloat16)
    assert torch.equal(model.first.weight, expected)


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BROKEN: dict[str, Callable[[Path], Any]] = {
    "no file": lambda path: (path / "model.safetensors").unlink(),
    "a file cut short": _cut,
    "no configuration": lambda path: (path / "config.json").unlink(),
    "a configuration that is no JSON": lambda path: (path / "config.json").write_text("{"),
    "a configuration that is a list": lambda path: (path / "config.json").write_text("[]"),
    "an index of nothing": lambda path: (path / "model.safetensors.index.json").write_text("{}"),
    "an index that leads elsewhere": lambda path: (
        path / "model.safetensors.index.json"
    ).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}})),
    "an index that does not agree": lambda path: (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors"}})
    ),
    "several files": lambda path: [
        (path / "model.safetensors").rename(path / "a.safetensors"),
        (path / "b.safetensors").write_bytes(b""),
    ],
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(case: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    BROKEN[case](path)
    with pytest.raises(CheckpointError):
        Checkpoint(str(path)).load_into(Net())


def test_options_say_what_a_configuration_needs(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(folder_of(tmp_path)))
    assert checkpoint.options() == {
        "weight_qmin": -8, "weight_qmax": 7, "group_size": 32, "symmetric": False,
        "scale_dtype": torch.float32, "algorithms": (checkpoint,),
    }  # fmt: skip
    plain = weights(bits=8, size=None, symmetric=True)
    config = gptq_config(bits=8, group_size=-1)
    path = write(tmp_path / "rows", config, {n: gptq(w) for n, w in plain.items()}, floats())
    by_row = Checkpoint(str(path))
    assert by_row.options() == {"weight_qmin": -128, "weight_qmax": 127, "algorithms": (by_row,)}
    assert by_row.options(group_size=16)["group_size"] == 16
    for wrong in (lambda: by_row.options("third"), lambda: by_row.options(group_size=64)):
        with pytest.raises(CheckpointError):
            wrong()


def test_a_configuration_with_it_is_saved(tmp_path: Path) -> None:
    """The folder is not needed to read it."""
    checkpoint = Checkpoint(str(tmp_path / "nowhere"))
    make = kit.ConfigFactory(group_sizes=(32,), scale_dtypes=(torch.bfloat16, torch.float32))
    config: QuantizationConfig = make(
        weight_only=True, group_size=32, scale_dtype=torch.float32, algorithms=(checkpoint,)
    )
    assert config_from_json(config_to_json(config)) == config
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint
