# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of GPTQ, AWQ and compressed-tensors, as their packages write them, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which channel of eight the fields of a word have, from the lowest on: AutoAWQ's order_map."""


@dataclass(frozen=True)
class Held:
    """A weight of unsigned integers `(out, in)`, with scales and zero points `(out, groups)`."""

    integers: Tensor
    scale: Tensor
    zeros: Tensor
    bits: int

    @property
    def values(self) -> Tensor:
        size = self.integers.shape[1] // self.scale.shape[1]
        scale, zeros = (v.repeat_interleave(size, 1) for v in (self.scale.float(), self.zeros))
        return (self.integers - zeros).float() * scale

    @property
    def signed(self) -> Tensor:
        return (self.integers - 2 ** (self.bits - 1)).to(torch.int8)


def held(
    outputs: int, inputs: int, *, bits: int = 4, size: int | None = 32, symmetric: bool = False,
    seed: int = 0, dtype: torch.dtype = torch.float16,
) -> Held:  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    groups = 1 if size is None else inputs // size
    shape = (outputs, groups)
    middle = torch.full(shape, 2 ** (bits - 1))
    zeros = middle if symmetric else torch.randint(1, 2**bits, shape, generator=random)
    integers = torch.randint(2**bits, (outputs, inputs), generator=random)
    scale = (torch.rand(shape, generator=random) * 0.02 + 1e-3).to(dtype)
    return Held(integers, scale, zeros, bits)


def words(rows: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return each row as 32-bit words, the first field in the lowest bits."""
    each = 32 // bits
    filled = torch.nn.functional.pad(rows.long(), (0, -rows.shape[1] % each))
    fields = filled.view(len(rows), -1, each)
    result = torch.zeros(fields.shape[:2], dtype=torch.int64)
    for place, channel in enumerate(range(each) if order is None else order):
        result += fields[..., channel] << (bits * place)
    return result.to(torch.int32).contiguous()


def gptq(weight: Held, *, less: int = 1, group_of_input: Tensor | None = None) -> dict[str, Tensor]:
    inputs, groups = weight.integers.shape[1], weight.scale.shape[1]
    usual = torch.arange(inputs) // (inputs // groups)
    return {
        "qweight": words(weight.integers, weight.bits).t().contiguous(),
        "qzeros": words(weight.zeros.t() - less, weight.bits),
        "scales": weight.scale.t().contiguous(),
        "g_idx": (usual if group_of_input is None else group_of_input).to(torch.int32),
    }


def awq(weight: Held) -> dict[str, Tensor]:
    return {
        "qweight": words(weight.integers.t(), 4, AWQ_ORDER),
        "qzeros": words(weight.zeros.t(), 4, AWQ_ORDER),
        "scales": weight.scale.t().contiguous(),
    }


def compressed(
    weight: Held, *, group_of_input: Tensor | None = None, symmetric: bool = True
) -> dict[str, Tensor]:
    """Zero points are there unless all are in the middle and the configuration says `symmetric`."""
    found = {
        "weight_packed": words(weight.integers, weight.bits),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.integers.shape),
    }
    if not symmetric or bool((weight.zeros != 2 ** (weight.bits - 1)).any()):
        found["weight_zero_point"] = words(weight.zeros.t(), weight.bits).t().contiguous()
    if group_of_input is not None:
        found["weight_g_idx"] = group_of_input.to(torch.int32)
    return found


def gptq_config(**other: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, **other}


def awq_config(**other: Any) -> dict[str, Any]:
    common = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    return {**common, "version": "gemm", **other}


def compressed_config(weights: Mapping[str, Any] = {}, **other: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}
    group = {"targets": ["Linear"], "weights": {"group_size": 32, **scheme}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **other,
    }


Pack = Callable[[Held], dict[str, Tensor]]
LAYOUTS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (gptq, gptq_config()),
    "gptq_v2": (lambda w: gptq(w, less=0), gptq_config(checkpoint_format="gptq_v2")),
    "awq": (awq, awq_config()),
    "compressed-tensors": (
        partial(compressed, symmetric=False),
        compressed_config({"symmetric": False}),
    ),
}


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
    floats: Mapping[str, Tensor] = {},
    *,
    files: int = 1,
) -> Path:
    """Write a folder as transformers does: tensors of modules, and others by their whole names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    every = {f"{m}.{part}": t for m, parts in tensors.items() for part, t in parts.items()}
    every |= {name: tensor.detach().clone() for name, tensor in floats.items()}
    if files == 1:
        save_file(every, folder / "model.safetensors")
        return folder
    shards = {name: f"model-{n % files + 1}-of-{files}.safetensors" for n, name in enumerate(every)}
    for file in set(shards.values()):
        save_file({n: t for n, t in every.items() if shards[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder
