# SPDX-License-Identifier: Apache-2.0
"""Speed, size and accuracy of a language model with a cache and few-bit weights, compared with peers.

LlamaForCausalLM of transformers with random weights: a prompt, then one token at a time. Each engine has
its own process. OpenVINO and ONNX Runtime get the cache as inputs and outputs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor, nn

PROMPT, STEPS, LONG = 32, 64, 512
VOCABULARY = 8000
PACKAGES = ("qompose", "torch", "transformers", "openvino", "nncf", "onnxruntime")
Run = Callable[[Tensor, Tensor], Tensor]
"""Returns logits (1, T, vocabulary) of tokens (1, T) at positions (T,)."""


def float_model(cache: int, *, small: bool = False) -> nn.Module:
    """Llama with a static cache in buffers, as transformers exports it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    wide, layers, inner = (64, 1, 128) if small else (512, 6, 1376)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=wide, num_hidden_layers=layers, intermediate_size=inner,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
        attn_implementation="sdpa", pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.cache_implementation = "static"
    return TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=cache).eval()


def example(length: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and their positions."""
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(first + 1))
    return ids, torch.arange(first, first + length)


def programs(cache: int, lengths: dict[str, int], *, small: bool = False) -> dict[str, Any]:
    """The methods, exported."""
    model = float_model(cache, small=small)
    return {
        name: torch.export.export(
            model, (), {"input_ids": example(n)[0], "cache_position": example(n)[1]}, strict=False
        )
        for name, n in lengths.items()
    }


def _x86(
    mode: str, *, compiled: bool, small: bool = False
) -> Callable[..., tuple[dict[str, Run], dict[str, Any]]]:
    def make(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
        import qompose
        from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
        from qompose_x86_inductor import (
            X86InductorQuantizer,
            get_default_x86_inductor_quantization_config as config,
        )

        weights = {
            "8": config(weight_only=True), "4": config(weight_only=True, group_size=32, algorithms=()),
            "4 with cache 8": config(weight_only=True, group_size=32, algorithms=(), cache=True),
            "cache 8": config(weight_only=True, cache=True).without("weight"),
            "dynamic 8": config(is_dynamic=True, per_token=True, algorithms=()),
            "dynamic 8x4": config(is_dynamic=True, per_token=True, group_size=32, algorithms=()),
        }[mode]  # fmt: skip
        table = EmbeddingQuantizer().set_global(
            None if mode == "cache 8" else get_embedding_quantization_config(8)
        )
        quantizer = qompose.compose(table, X86InductorQuantizer().set_global(weights))
        prepared = qompose.prepare_pt2e(programs(cache, lengths, small=small), quantizer)
        converted = qompose.convert_pt2e(prepared)
        lowered = qompose.lower(converted)
        size = qompose.report(lowered["decode" if "decode" in lowered else next(iter(lowered))])
        runs = qompose.compile_lowered(lowered) if compiled else lowered
        found = {"bytes": size.bytes_after, "converted": _named(converted), "lowered": lowered}
        return _named(runs), found

    return make


def _executorch(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
    import qompose
    from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
    from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config

    weights = get_symmetric_quantization_config(
        is_per_channel=True, is_dynamic=True, group_size=32, algorithms=()
    )
    table = EmbeddingQuantizer().set_global(get_embedding_quantization_config(8))
    quantizer = qompose.compose(table, XNNPACKQuantizer().set_global(weights))
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(programs(cache, lengths), quantizer))
    program = qompose.lower(converted, target="executorch")
    parts = {name: method.delegation for name, method in program.methods.items()}
    counts = {n: (len(part.delegates), len(part.portable)) for n, part in parts.items()}
    found = {"bytes": program.nbytes, "converted": _named(converted), "delegates": counts}
    return _named(program.methods), found


def _named(methods: Any) -> dict[str, Run]:
    return {
        name: lambda ids, place, run=run: run(input_ids=ids, cache_position=place)
        for name, run in methods.items()
    }


def _float(*, compiled: bool) -> Callable[..., tuple[dict[str, Run], dict[str, Any]]]:
    def make(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
        methods = {name: program.module() for name, program in programs(cache, lengths).items()}
        held = [*next(iter(methods.values())).parameters(), *next(iter(methods.values())).buffers()]
        size = sum(t.nbytes for t in {t.data_ptr(): t for t in held}.values())
        if compiled:
            methods = {name: torch.compile(module) for name, module in methods.items()}
        return _named(methods), {"bytes": size}

    return make


class Functional(nn.Module):
    """The model with its cache as inputs and outputs."""

    def __init__(self, cache: int) -> None:
        super().__init__()
        self.model = float_model(cache)

    def forward(self, ids: Tensor, place: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        layers = self.model.static_cache.layers
        for layer, keys, values in zip(layers, state[::2], state[1::2], strict=True):
            layer.keys, layer.values = keys.clone(), values.clone()
            layer.cumulative_length = place[:1].clone()[0]
        logits = self.model.model(input_ids=ids, past_key_values=self.model.static_cache).logits
        return (logits, *(t for layer in layers for t in (layer.keys, layer.values)))

    def state(self) -> list[Tensor]:
        return [t for layer in self.model.static_cache.layers for t in (layer.keys, layer.values)]


def _onnx_files(cache: int, lengths: dict[str, int], folder: Path) -> Iterator[tuple[str, Path]]:
    for name, length in lengths.items():
        model = Functional(cache)
        given = (*example(length), *(torch.zeros_like(t) for t in model.state()))
        with torch.no_grad():
            torch.onnx.export(model, given, folder / f"{name}.onnx", dynamo=True, verbose=False)
        yield name, folder / f"{name}.onnx"


def _stateful(call: Callable[[list[Any]], list[Any]], state: list[Any]) -> Run:
    """Feed what comes out for the cache back into it; `state` is shared by all methods."""

    def run(ids: Tensor, place: Tensor) -> Tensor:
        logits, *state[:] = call([ids.numpy(), place.numpy(), *state])
        return torch.from_numpy(logits)

    return run


def _openvino(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
    import nncf
    import openvino

    runs, size = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        state = [t.numpy() for t in Functional(cache).state()]
        for name, file in _onnx_files(cache, lengths, Path(folder)):
            model = nncf.compress_weights(
                openvino.convert_model(file), mode=nncf.CompressWeightsMode.INT4_SYM, ratio=1.0,
                group_size=32, all_layers=False,
            )  # fmt: skip
            threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
            request = openvino.Core().compile_model(model, "CPU", threads).create_infer_request()
            openvino.save_model(model, Path(folder) / f"{name}.xml", compress_to_fp16=False)
            size = (Path(folder) / f"{name}.bin").stat().st_size

            def call(inputs: list[Any], request: Any = request) -> list[Any]:
                return [value.copy() for value in request.infer(inputs).values()]

            runs[name] = _stateful(call, state)
    return runs, {"bytes": size}


def _onnxruntime(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
    import onnx
    import onnxruntime
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    runs, size = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        state = [t.numpy() for t in Functional(cache).state()]
        for name, file in _onnx_files(cache, lengths, Path(folder)):
            quantizer = MatMulNBitsQuantizer(
                onnx.load(file), block_size=32, is_symmetric=True, accuracy_level=4
            )
            quantizer.process()
            quantizer.model.save_model_to_file(str(file.with_suffix(".int4.onnx")), False)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(file.with_suffix(".int4.onnx"), options)
            size = file.with_suffix(".int4.onnx").stat().st_size
            names = [given.name for given in session.get_inputs()]

            def call(inputs: list[Any], session: Any = session, names: Any = names) -> list[Any]:
                return session.run(None, dict(zip(names, inputs, strict=True)))  # type: ignore[no-any-return]

            runs[name] = _stateful(call, state)
    return runs, {"bytes": size}


ENGINES: dict[str, Callable[..., tuple[dict[str, Run], dict[str, Any]]]] = {
    "float": _float(compiled=False),
    "float, compiled": _float(compiled=True),
    **{
        f"x86 {mode}{', compiled' * compiled}": _x86(mode, compiled=compiled)
        for mode in ("8", "4", "4 with cache 8", "cache 8", "dynamic 8", "dynamic 8x4")
        for compiled in (False, True)
    },
    "ExecuTorch dynamic 8x4": _executorch,
    "OpenVINO int4": _openvino,
    "ONNX Runtime int4": _onnxruntime,
}


def generated(runs: dict[str, Run], steps: int) -> Tensor:
    """Logits of a prompt and forced tokens after it, one at a time."""
    parts = [runs["prefill"](*example(PROMPT))]
    parts += [runs["decode"](*example(1, PROMPT + step)).clone() for step in range(steps)]
    return torch.cat([part.float() for part in parts], 1)


def seconds(run: Callable[[], Any], least: float) -> float:
    """The median of calls, at least three, over so many seconds."""
    times: list[float] = []
    run()
    while len(times) < 3 or sum(times) < least:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def resident() -> int:
    """Bytes of this process that are no file's, when the allocator has given back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return machine.anonymous_bytes()


def memory_of(engine: str, lowered: Any) -> int:
    """What a process that loads the methods and runs them takes for them, in bytes.

    A small model was loaded, run and freed before: what imports and a first call take is not the methods'.
    """
    import qompose

    mode, compiled = engine.removeprefix("x86 ").partition(",")[::2]
    lengths = {"prefill": PROMPT, "decode": 1}
    _, small = _x86(mode, compiled=False, small=True)(PROMPT + STEPS, lengths)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.qompose" for name in ("small", "methods")]
        for model, file in zip((small["lowered"], lowered), files, strict=True):
            qompose.save(model, file)
        command = [sys.executable, __file__, *(["--compiled"] if compiled else []), "--load"]
        done = subprocess.run(
            [*command, *map(str, files)], capture_output=True, text=True, check=True
        )
    return int(done.stdout.splitlines()[-1])


def loaded(files: list[Path], *, compiled: bool) -> int:
    """What methods of the last file take here, in bytes, when they have run, after those of the others."""
    import qompose
    import qompose_embedding  # noqa: F401 - their operators
    import qompose_x86_inductor  # noqa: F401

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    for file in files:
        methods = None
        before = resident()
        methods = qompose.load(file)
        if compiled:
            methods = qompose.compile_lowered(methods)
        generated(_named(methods), 1)
    return resident() - before


def sqnr(wanted: Tensor, actual: Tensor) -> float:
    return (20 * torch.log10(wanted.norm() / (wanted - actual).norm())).item()


def measured(
    engine: str, threads: int, least: float, *, true: bool, memory: bool, cache: int
) -> dict[str, Any]:
    """What one engine does; in place of times `true`: how true it is to float and to its Q/DQ form.

    Or `memory`: what the process holds for it.
    """
    warnings.filterwarnings("ignore")
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    runs, found = ENGINES[engine](cache, {"prefill": PROMPT, "decode": 1})
    converted, lowered = found.pop("converted", None), found.pop("lowered", None)
    if true:
        wanted = generated(
            _float(compiled=False)(cache, {"prefill": PROMPT, "decode": 1})[0], STEPS
        )
        actual = generated(runs, STEPS)
        found["sqnr"] = sqnr(wanted, actual)
        if converted is not None:
            found["to_qdq"] = sqnr(generated(converted, STEPS), actual)
            found["qdq"] = sqnr(wanted, generated(converted, STEPS))
        return found
    if memory:
        if lowered is not None:
            found["memory"] = memory_of(engine, lowered)
        return found
    del converted, lowered
    found["decode"] = seconds(partial(runs["decode"], *example(1, PROMPT)), least)
    found["prefill"] = seconds(partial(runs["prefill"], *example(PROMPT)), least)
    del runs
    long, _ = ENGINES[engine](LONG, {"long": LONG})
    found["long"] = seconds(lambda: long["long"](*example(LONG)), least)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def in_turn(engines: list[str], rounds: int, cache: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a token and of a prompt by engine, quartiles of rounds in which each has its turn."""
    warnings.filterwarnings("ignore")
    torch.set_grad_enabled(False)
    lengths = {"prefill": PROMPT, "decode": 1}
    runs = {engine: ENGINES[engine](cache, lengths)[0] for engine in engines}
    for methods in runs.values():
        generated(methods, 4)
    times: dict[str, dict[str, list[float]]] = {e: {name: [] for name in lengths} for e in engines}
    for _ in range(rounds):
        for engine, methods in runs.items():
            for name, given in (("prefill", example(PROMPT)), ("decode", example(1, PROMPT))):
                begun = time.perf_counter()
                methods[name](*given)
                times[engine][name].append(time.perf_counter() - begun)
    return {e: {n: statistics.quantiles(t) for n, t in own.items()} for e, own in times.items()}


def table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Rows in Markdown."""
    yield (
        "| engine | bytes, MB | process, MB | decode, tokens/s | of float | prefill of 32, ms | "
        "prefill of 512, ms | of float | SQNR to float, dB | to Q/DQ, dB |"
    )
    yield "|---|" + "---:|" * 9
    base = rows.get("float", {})

    def cell(row: dict[str, Any], name: str, factor: float = 1.0, digits: int = 1) -> str:
        return f"{row[name] * factor:.{digits}f}" if name in row else ""

    def ratio(row: dict[str, Any], name: str) -> str:
        return f"{base[name] / row[name]:.2f}" if name in row and name in base else ""

    for engine, row in rows.items():
        speed = f"{1 / row['decode']:.0f}" if "decode" in row else row.get("error", "")
        cells = (
            cell(row, "bytes", 1e-6), cell(row, "memory", 1e-6), speed, ratio(row, "decode"),
            cell(row, "prefill", 1e3), cell(row, "long", 1e3), ratio(row, "long"),
            cell(row, "sqnr"), cell(row, "to_qdq"),
        )  # fmt: skip
        yield f"| {engine} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="seconds for each measurement (default: %(default)s)",
    )
    parser.add_argument("--true", action="store_true", help="measure SQNR instead of times")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of times")
    parser.add_argument(
        "--cache",
        type=int,
        default=PROMPT + STEPS,
        help="tokens that the cache has room for (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="keep figures in this file and add to them")
    parser.add_argument(
        "--turns", type=int, help="time the engines in one process, in turn, in so many rounds"
    )
    parser.add_argument("--one", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(loaded(given.load, compiled=given.compiled))
        return
    if given.turns:
        torch.set_num_threads(given.threads[0])
        for engine, found in in_turn(given.engines, given.turns, given.cache).items():
            each = (f"{n} {', '.join(f'{t * 1e3:.2f}' for t in ts)} ms" for n, ts in found.items())
            print(f"{engine}: {'; '.join(each)}")
        return
    if given.one:
        print(
            json.dumps(
                measured(
                    given.one,
                    given.threads[0],
                    given.seconds,
                    true=given.true,
                    memory=given.memory,
                    cache=given.cache,
                )
            )
        )
        return
    kept = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    for threads in given.threads:
        rows = kept.setdefault(str(threads), {})
        for engine in given.engines:
            command = [sys.executable, __file__, "--one", engine, "--threads", str(threads)]
            command += ["--cache", str(given.cache)]
            command += ["--seconds", str(given.seconds), *(["--true"] if given.true else [])]
            command += ["--memory"] if given.memory else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            last = (done.stdout.strip() or done.stderr.strip() or "{}").splitlines()[-1]
            found = json.loads(last) if done.returncode == 0 else {"error": last[:100]}
            rows[engine] = {**rows.get(engine, {}), **found}
            print(threads, engine, found, file=sys.stderr, flush=True)
            if given.json:
                given.json.write_text(json.dumps(kept))
    print("\n".join(machine.lines(machine.facts(PACKAGES))))
    for threads, rows in kept.items():
        print(f"\n{threads} thread{'s' * (threads != '1')}\n")
        print("\n".join(table({name: rows[name] for name in ENGINES if name in rows})))


if __name__ == "__main__":
    main()
