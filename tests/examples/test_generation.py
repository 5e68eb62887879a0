# SPDX-License-Identifier: Apache-2.0
"""A lowered decoder gives the tokens of the model in float, and a full cache is an error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor

NEEDED = ("transformers", "qompose_x86_inductor", "qompose_embedding")
WIDTH, CONTEXT, STOP = 4, 16, 2
GIVEN = [5, 9, 11, 3, 60, 7]


@functools.cache
def _model() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=CONTEXT, attn_implementation="sdpa",
        pad_token_id=0, bos_token_id=1, eos_token_id=STOP,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@functools.cache
def _methods() -> dict[str, torch.export.ExportedProgram]:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers and torch say of their own code
        _model().generation_config.cache_implementation = "static"
        cached = TorchExportableModuleWithStaticCache(_model(), batch_size=1, max_cache_len=CONTEXT)
        return {
            name: torch.export.export(cached.eval(), (), arguments, strict=False)
            for name, arguments in (("prefill", _arguments(WIDTH)), ("decode", _arguments(1)))
        }


def _arguments(size: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.ones(1, size, dtype=torch.int64),
        "cache_position": torch.arange(size),
    }


Methods = Mapping[str, Callable[..., Tensor]]


def _lowered(path: Path, config: Any = None) -> Methods:
    """Lower, save and load; without a configuration nothing is quantized."""
    from qompose_x86_inductor import X86InductorQuantizer

    quantizer = X86InductorQuantizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was quantized
        prepared = qompose.prepare_pt2e(_methods(), quantizer.set_global(config))
        lowered = qompose.lower(qompose.convert_pt2e(prepared))
        qompose.save(lowered, path / "decoder.qompose")
        loaded: Methods = qompose.load(path / "decoder.qompose")
    return loaded


@torch.no_grad()
def _greedy(given: list[int], count: int) -> list[int]:
    """What the model itself likes best, all tokens at once each time."""
    tokens = [*given]
    for _ in range(count):
        logits = _model()(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(given) :]


@pytest.fixture
def decoder(example: Any, tmp_path: Path) -> Any:
    made = example("generation", *NEEDED)
    return made.Decoder(_lowered(tmp_path), WIDTH, CONTEXT)


def test_temperature_zero_is_greedy_by_both_ways(decoder: Any, example: Any) -> None:
    generation, count = example("generation", *NEEDED), CONTEXT - len(GIVEN)
    expected = _greedy(GIVEN, count)
    assert [*generation.stream(decoder, GIVEN, count)] == expected
    again = [*generation.stream(decoder, GIVEN[:3], 4)]  # another prompt, shorter than a prefill
    assert again == _greedy(GIVEN[:3], 4)
    model = generation.ForGenerate(decoder, _model().config)
    made = model.generate(
        torch.tensor([GIVEN]), max_new_tokens=count, do_sample=False, eos_token_id=63
    )
    ended = expected.index(63) + 1 if 63 in expected else count
    assert made[0, len(GIVEN) :].tolist() == expected[:ended]


def test_stop_tokens_and_streaming(decoder: Any, example: Any) -> None:
    generation = example("generation", *NEEDED)
    expected = _greedy(GIVEN, 6)
    stop = expected[3]
    assert [*generation.stream(decoder, GIVEN, 6, stop={stop})] == expected[: expected.index(stop)]
    coming = generation.stream(decoder, GIVEN, 6)
    assert next(coming) == expected[0]
    assert decoder.held == GIVEN  # the second was not computed yet


def test_sampling(decoder: Any, example: Any) -> None:
    """A tiny top-p leaves the likeliest token alone, and a generator makes the same text again."""
    generation = example("generation", *NEEDED)
    greedy = [*generation.stream(decoder, GIVEN, 6)]
    assert [*generation.stream(decoder, GIVEN, 6, temperature=9.0, top_p=1e-6)] == greedy

    def sample(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [*generation.stream(decoder, GIVEN, 10, temperature=2.0, generator=generator)]

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1


def test_top_p_keeps_as_few_as_add_up_to_it(example: Any) -> None:
    generation = example("generation", *NEEDED)
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)

    def seen(top_p: float, temperature: float = 1.0) -> list[float]:
        drawn = [generation.choose(logits, temperature, top_p, generator) for _ in range(2000)]
        return [drawn.count(n) / len(drawn) for n in range(4)]

    assert seen(0.7) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.05)
    assert seen(1.0) == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.05)
    squares = [0.01, 0.25, 0.0225, 0.0625]
    assert seen(1.0, 0.5) == pytest.approx([s / sum(squares) for s in squares], abs=0.05)


def test_a_full_cache_is_an_error(decoder: Any, example: Any) -> None:
    generation = example("generation", *NEEDED)
    longest = CONTEXT - len(GIVEN) + 1  # the last token is not read
    assert len([*generation.stream(decoder, GIVEN, longest)]) == longest
    with pytest.raises(generation.ContextError):
        next(generation.stream(decoder, GIVEN, longest + 1))
    with pytest.raises(generation.ContextError):
        decoder.read([])
    model = generation.ForGenerate(decoder, _model().config)
    with pytest.raises(generation.ContextError):
        model.generate(
            torch.tensor([GIVEN]), max_new_tokens=longest + 1, eos_token_id=99, do_sample=False
        )
    for name, size in (("decode", 1), ("prefill", WIDTH)):  # without the loop too
        ids, positions = torch.ones(1, size, dtype=torch.int64), torch.arange(size) + CONTEXT
        with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
            decoder.methods[name](input_ids=ids, cache_position=positions)


def test_generate_refuses_batches_and_padding(decoder: Any, example: Any) -> None:
    generation = example("generation", *NEEDED)
    model = generation.ForGenerate(decoder, _model().config)
    with pytest.raises(generation.SequenceError):
        model.generate(torch.tensor([GIVEN, GIVEN]), max_new_tokens=2)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    with pytest.raises(generation.SequenceError):
        model.generate(torch.tensor([GIVEN]), attention_mask=mask, max_new_tokens=2)


@pytest.mark.full
def test_the_script(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("generation", *NEEDED).main([]) == 0
    assert len(capsys.readouterr().out.split()) > 8
