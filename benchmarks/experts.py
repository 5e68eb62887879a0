# SPDX-License-Identifier: Apache-2.0
"""Accuracy of mixtures of experts, by form: of each expert on the rows that are routed to it, and of Mixtral.

A mixture of 8 experts, 64 wide, is trained on eight kinds of rows, each in a space of its own with its own
linear map, so that experts specialize. Mixtral has random weights and a static cache. SQNR to float in dB.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from typing import Any

import qompose
import torch
import transformers
from qompose.testing.fixtures import sqnr
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as x86,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations import moe as _moe  # noqa: F401 - registers grouped products

EXPERTS, WIDE, INNER, INSIDE, ROWS, STEPS = 8, 64, 128, 12, 128, 1500
WORDS, PROMPT, TOKENS = 64, 6, 8
_FEW = {"weight_only": True, "group_size": 32}
FORMS: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"is_dynamic": True},
    "8 bits": {"weight_only": True},
    "4 bits": _FEW,
    "4 bits, GPTQ": {**_FEW, "algorithms": ("gptq",)},
    "4 bits, sequential GPTQ": {**_FEW, "algorithms": ("gptq_sequential",)},
}


class Mixture(nn.Module):
    """Each row goes to the expert that a router likes best; rows are sorted by expert, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDE, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDE, INNER) / WIDE**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDE) / INNER**0.5)
        self.norm = nn.RMSNorm(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        share, expert = self.router(x).softmax(-1).max(-1)
        order, product = expert.argsort(stable=True), torch.ops.transformers.grouped_mm_fallback
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, expert, expert * 0 + 1)
        ends = counts.cumsum(0).to(torch.int32)
        y = product(F.silu(product(x[order], self.up, ends)), self.down, ends)
        y = y * share[order, None]
        return torch.zeros_like(y).scatter(0, order[:, None].expand_as(y), y)

    def trained_on(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The loss, with a part that keeps experts equally busy."""
        x = self.norm(x)
        shares = self.router(x).softmax(-1)
        share, expert = shares.max(-1)
        y = torch.zeros_like(x)
        for i in range(EXPERTS):
            own = expert == i
            made = F.silu(x[own] @ self.up[i]) @ self.down[i] * share[own, None]
            y = y.masked_scatter(own[:, None], made)
        busy = F.one_hot(expert, EXPERTS).float().mean(0)
        return F.mse_loss(y, wanted) + 0.02 * EXPERTS * (busy * shares.mean(0)).sum()


def kinds() -> tuple[Tensor, Tensor, Tensor]:
    """The space, the middle and the map of each kind of rows."""
    generator = torch.Generator().manual_seed(1)
    spaces = torch.linalg.qr(torch.randn(EXPERTS, WIDE, INSIDE, generator=generator))[0].mT
    middles = 0.5 * torch.randn(EXPERTS, WIDE, generator=generator)
    return spaces, middles, torch.randn(EXPERTS, WIDE, WIDE, generator=generator) * 2 / WIDE**0.5


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spaces, middles, maps = kinds()
    kind = torch.randint(EXPERTS, (count,), generator=generator)
    inside = torch.randn(count, 1, INSIDE, generator=generator)
    x = middles[kind] + (inside @ spaces[kind]).squeeze(1)
    x = x + 0.02 * torch.randn(count, WIDE, generator=generator)
    return x, torch.tanh((x[:, None] @ maps[kind]).squeeze(1))


def trained() -> Mixture:
    torch.manual_seed(0)
    model, (x, wanted) = Mixture(), rows(8192, 2)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(STEPS):
        some = torch.randint(len(x), (256,))
        loss = model.trained_on(x[some], wanted[some])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval().requires_grad_(False)


def quantizer(options: dict[str, Any]) -> X86InductorQuantizer:
    return X86InductorQuantizer().set_global(x86(**options))


def of_experts() -> Iterator[str]:
    model, test = trained(), rows(16 * ROWS, 3)[0].split(ROWS)
    program = torch.export.export(model, (test[0],))
    wanted = torch.cat([model(part) for part in test])
    expert = model.router(model.norm(torch.cat(test))).argmax(-1)
    for name, options in FORMS.items():
        prepared = qompose.prepare_pt2e(program, quantizer(options))
        qompose.calibrate(prepared, [(rows(ROWS, 100 + i)[0],) for i in range(16)])
        lowered = qompose.lower(qompose.convert_pt2e(prepared))
        found = torch.cat([lowered(part) for part in test])
        each = [f"{sqnr(wanted[expert == i], found[expert == i]):.1f}" for i in range(EXPERTS)]
        yield f"| {name} | {sqnr(wanted, found):.1f} | {' | '.join(each)} |"


def tokens(seed: int) -> list[dict[str, Tensor]]:
    """A prompt, and tokens after it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (1, PROMPT + TOKENS), generator=generator)
    parts = (PROMPT, *[1] * TOKENS)
    places = torch.arange(PROMPT + TOKENS).split(parts)
    return [
        {"input_ids": i, "cache_position": p}
        for i, p in zip(ids.split(parts, 1), places, strict=True)
    ]


def logits(methods: Any, seed: int) -> Tensor:
    prompt, *others = tokens(seed)
    return torch.cat([methods["prefill"](**prompt), *(methods["decode"](**o) for o in others)], 1)


def mixtral(**sizes: int) -> dict[str, torch.export.ExportedProgram]:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=WIDE, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=INNER, max_position_embeddings=32,
        attn_implementation="sdpa", sliding_window=None, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.cache_implementation = "static"
    room = PROMPT + TOKENS
    cached = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=room).eval()
    prompt, token, *_ = tokens(0)
    return {
        name: torch.export.export(cached, (), given, strict=False)
        for name, given in (("prefill", prompt), ("decode", token))
    }


def on_executorch() -> str:
    from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config

    programs = mixtral(num_local_experts=4)
    wanted = logits({name: program.module() for name, program in programs.items()}, 0)
    config = get_symmetric_quantization_config(
        is_per_channel=True, is_dynamic=True, group_size=32, algorithms=()
    )
    prepared = qompose.prepare_pt2e(programs, XNNPACKQuantizer().set_global(config))
    converted = qompose.convert_pt2e(prepared)
    program = qompose.lower(converted, target="executorch")
    found, lowered = (logits(methods, 0) for methods in (converted, program.methods))
    return f"| ExecuTorch, 4 experts | {sqnr(wanted, lowered):.1f} | {sqnr(found, lowered):.1f} |"


def of_mixtral() -> Iterator[str]:
    programs = mixtral()
    wanted = logits({name: program.module() for name, program in programs.items()}, 0)
    for name, options in FORMS.items():
        if "gptq_sequential" in options.get(
            "algorithms", ()
        ):  # it is refused: methods share a cache
            continue
        prepared = qompose.prepare_pt2e(programs, quantizer(options))
        for seed in range(1, 9):
            logits(prepared, seed)
        converted = qompose.convert_pt2e(prepared)
        found, lowered = (logits(methods, 0) for methods in (converted, qompose.lower(converted)))
        yield f"| {name} | {sqnr(wanted, lowered):.1f} | {sqnr(found, lowered):.1f} |"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executorch", action="store_true", help="that row alone: 8 x 4 bits")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # what transformers and torch say of their own code
    if given.executorch:
        with torch.no_grad():
            print(on_executorch())
        return
    with torch.no_grad():
        print(
            "| Mixtral | to float | to Q/DQ |\n|---|---:|---:|", *of_mixtral(), sep="\n", flush=True
        )
    numbers = " | ".join(map(str, range(EXPERTS)))
    print(f"\n| trained | all | {numbers} |\n|---|{'---:|' * (EXPERTS + 1)}", flush=True)
    for line in of_experts():
        print(line, flush=True)


if __name__ == "__main__":
    main()
