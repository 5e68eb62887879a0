# SPDX-License-Identifier: Apache-2.0
"""Memory and time of quantizing a checkpoint on disk, beside torchao's `quantize_`.

    python benchmarks/larger_than_memory.py FOLDER --size 1.5B

LlamaForCausalLM of transformers, random weights in bfloat16, in shards of four layers. Each engine runs in a
process of its own, of which this one reads the anonymous memory (smaps) every 20 ms; what the process had
after its imports is taken off. `ours` quantizes from the files to a file; `torchao` loads the model into
memory first, and time is that of `quantize_` alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_IN_A_SHARD = 4
"""Layers."""
_EVERY = 0.02
"""Seconds."""
GROUP = 32
OURS = ["x86_inductor:weight-only int4 groups of 32, weights symmetric"]


NAMES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
SIZES = {
    "0.2B": (2, 2048, 5632, 32, 4, 32_000),
    "1.5B": (32, 2048, 5632, 32, 4, 32_000),
    "8B": (32, 4096, 14_336, 32, 8, 128_256),
    "2 of 8B": (2, 4096, 14_336, 32, 8, 128_256),
}
"""By name, what `NAMES` are; 8B is Llama 3's, and `2 of 8B` two of its layers and both tables."""


class Logits(nn.Module):
    """A decoder without a cache, from tokens to logits."""

    def __init__(self, size: str) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = dict(zip(NAMES, SIZES[size], strict=True))
        config = LlamaConfig(**sizes, use_cache=False)
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens).logits
        return logits


def on_meta(size: str) -> nn.Module:
    """The model without memory for its parameters; what it computes from its configuration is real."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("meta"):
        model = Logits(size).to(torch.bfloat16).eval().requires_grad_(False)
    inner: Any = model.model
    inner.model.rotary_emb = LlamaRotaryEmbedding(inner.config)
    return model


def shards(size: str) -> Iterator[dict[str, torch.Tensor]]:
    """Random weights, some layers at a time."""
    torch.manual_seed(0)
    part: dict[str, torch.Tensor] = {}
    place = 0
    for name, meta in on_meta(size).state_dict().items():
        found = [int(word) for word in name.split(".") if word.isdigit()]
        number = found[0] // _IN_A_SHARD if found else place
        if number != place and part:
            yield part
            part, place = {}, number
        part[name] = (torch.randn(meta.shape) * 0.02).to(torch.bfloat16)
    yield part


def write_checkpoint(folder: Path, size: str) -> None:
    """Write the shards and their index."""
    where: dict[str, str] = {}
    for number, part in enumerate(shards(size)):
        file = f"model-{number:05}.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def ours(folder: Path, size: str) -> dict[str, Any]:
    """Quantize from the files to a file."""
    import qompose

    model, tokens = on_meta(size), torch.arange(16)[None]
    _ready()
    start = time.process_time(), time.perf_counter()
    qompose.quantize_checkpoint(
        model, (tokens,), checkpoint=folder, path=folder / "int4.qompose", backends=OURS
    )
    return _taken(start)


def torchao(folder: Path, size: str) -> dict[str, Any]:
    """Quantize in memory."""
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    model = on_meta(size)
    _ready()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(file)
    model.load_state_dict(tensors, assign=True)
    del tensors
    int4 = torch.int4  # type: ignore[attr-defined]  # unknown to its stubs
    start = time.process_time(), time.perf_counter()
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(GROUP)))
    return _taken(start)


def _taken(start: tuple[float, float]) -> dict[str, Any]:
    return {"cpu": time.process_time() - start[0], "seconds": time.perf_counter() - start[1]}


def _ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def measured(engine: str, folder: Path, size: str) -> dict[str, Any]:
    """Run an engine in a process of its own, and return what it said and took."""
    command = [sys.executable, __file__, str(folder), "--size", size, "--engine", engine]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        before = _anonymous(process.pid)
        most = before
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None:
            most = max(most, _anonymous(process.pid))
            time.sleep(_EVERY)
        said = process.stdout.read()
    return {**json.loads(said), "imports": before, "anonymous": most - before}


def _anonymous(process: int) -> int:
    """Bytes; 0 of a process that is gone."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


ENGINES = {"ours": ours, "torchao": torchao}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1.5B")
    parser.add_argument(
        "--engine", choices=ENGINES, help="run it here, for the process that measures"
    )
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(ENGINES[options.engine](options.folder, options.size)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "model.safetensors.index.json").exists():
        write_checkpoint(options.folder, options.size)
    weights = [t.numel() for t in on_meta(options.size).state_dict().values()]
    print(f"{sum(weights):,} parameters, the largest tensor {max(weights) * 2 / 1e6:.0f} MB")
    print("| engine | s | CPU s | CPU ns per parameter | anonymous memory, MB | file, MB |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for engine in options.engines:
        row = measured(engine, options.folder, options.size)
        file = options.folder / "int4.qompose"
        written = f"{file.stat().st_size / 1e6:.0f}" if engine == "ours" else ""
        pace, memory = row["cpu"] / sum(weights) * 1e9, row["anonymous"] / 1e6
        seconds = f"{row['seconds']:.1f} | {row['cpu']:.1f} | {pace:.1f}"
        print(f"| {engine} | {seconds} | {memory:.0f} | {written} |", flush=True)


if __name__ == "__main__":
    main()
