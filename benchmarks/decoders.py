# SPDX-License-Identifier: Apache-2.0
"""Speed, size and accuracy of a language model with a cache and few-bit weights, compared with peers.

LlamaForCausalLM of transformers with random weights: a prompt, then one token at a time. Each engine has
its own process, and they run in turn. ONNX files, ours too, have the cache as inputs and outputs;
llama.cpp has one of its own, in float16.

    python benchmarks/decoders.py              # times, in turn
    python benchmarks/decoders.py --facts      # bytes, memory and SQNR in place of times
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from comparing import Comparison
from side_by_side import Call, Row
from torch import Tensor, nn

PROMPT, STEPS, LONG = 32, 64, 512
METHODS = {
    "decode": {"prefill": PROMPT, "decode": 1},
    "prefill-32": {"prefill": PROMPT},
    "prefill-512": {"long": LONG},
}
"""By what is timed, the methods that an engine makes; the last of them is run, after the others."""
VOCABULARY = 8000
OPTIONS: dict[str, dict[str, Any]] = {
    "8": {"weight_only": True},
    "4": {"weight_only": True, "group_size": 32},
    "dynamic 8": {"is_dynamic": True},
    "dynamic 8x4": {"is_dynamic": True, "group_size": 32},
}
"""Of configurations of XNNPACK and ONNX, by mode."""
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


def with_table(linears: Any) -> Any:
    """Compose a quantizer with one that keeps the embedding table in 8 bits."""
    import qompose
    from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config

    table = EmbeddingQuantizer().set_global(get_embedding_quantization_config(8))
    return qompose.compose(table, linears)


def x86(
    mode: str, *, compiled: str = "", small: bool = False
) -> Callable[..., tuple[dict[str, Run], dict[str, Any]]]:
    def make(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
        import qompose
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
        linears = X86InductorQuantizer().set_global(weights)
        quantizer = linears if mode == "cache 8" else with_table(linears)
        prepared = qompose.prepare_pt2e(programs(cache, lengths, small=small), quantizer)
        converted = qompose.convert_pt2e(prepared)
        lowered = qompose.lower(converted)
        size = qompose.report(lowered["decode" if "decode" in lowered else next(iter(lowered))])
        runs = qompose.compile_lowered(lowered, compiled) if compiled else lowered
        found = {"bytes": size.bytes_after, "converted": _named(converted), "lowered": lowered}
        return _named(runs), found

    return make


def _xnnpack(
    mode: str, target: str
) -> Callable[[int, dict[str, int]], tuple[dict[str, Run], dict[str, Any]]]:
    def make(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
        import qompose
        from qompose_xnnpack import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config as config,
        )

        weights = config(is_per_channel=True, algorithms=(), **OPTIONS[mode])
        quantizer = with_table(XNNPACKQuantizer().set_global(weights))
        converted = qompose.convert_pt2e(qompose.prepare_pt2e(programs(cache, lengths), quantizer))
        if target == "executorch":
            return _on_executorch(converted)
        lowered = qompose.lower(converted)
        size = qompose.report(next(reversed(lowered.values()))).bytes_after
        return _named(lowered), {"bytes": size, "converted": _named(converted)}

    return make


def _on_executorch(converted: Any) -> tuple[dict[str, Run], dict[str, Any]]:
    import qompose
    from runtime_engines import take_threads

    take_threads(torch.get_num_threads())
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


def _functional(
    cache: int, lengths: dict[str, int]
) -> Iterator[tuple[str, Functional, tuple[Tensor, ...]]]:
    """Yield each method with example inputs."""
    for name, length in lengths.items():
        model = Functional(cache)
        yield name, model, (*example(length), *(torch.zeros_like(t) for t in model.state()))


def _onnx_files(cache: int, lengths: dict[str, int], folder: Path) -> Iterator[tuple[str, Path]]:
    for name, model, given in _functional(cache, lengths):
        with torch.no_grad():
            torch.onnx.export(model, given, folder / f"{name}.onnx", dynamo=True, verbose=False)
        yield name, folder / f"{name}.onnx"


def _stateful(call: Callable[[list[Any]], Any], state: list[Any]) -> Run:
    """Feed what comes out for the cache back into it; `state` is shared by all methods."""

    def run(ids: Tensor, place: Tensor) -> Tensor:
        logits, *state[:] = call([ids.numpy(), place.numpy(), *state])
        return torch.as_tensor(logits)

    return run


def _of_tensors(module: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda inputs: module(*map(torch.as_tensor, inputs))


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
            size = file.with_suffix(".int4.onnx").stat().st_size
            runs[name] = _stateful(_session(file.with_suffix(".int4.onnx")), state)
    return runs, {"bytes": size}


def _session(file: Path) -> Callable[[list[Any]], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options)
    names = [given.name for given in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def _as_a_file(program: Any) -> Callable[[list[Any]], Any]:
    with tempfile.TemporaryDirectory() as folder:
        return _session(program.save(Path(folder) / "program.onnx"))


def _onnx(
    mode: str, target: str, *, alone: bool = False
) -> Callable[[int, dict[str, int]], tuple[dict[str, Run], dict[str, Any]]]:
    """Files of the model with its cache as inputs and outputs, called from Python or as any file.

    Called from Python, products of weights alone are exact; by itself ONNX Runtime rounds their inputs.
    """

    def make(cache: int, lengths: dict[str, int]) -> tuple[dict[str, Run], dict[str, Any]]:
        import qompose
        from qompose_onnx import ONNXQuantizer, get_onnx_quantization_config as config

        linears = ONNXQuantizer().set_global(config(algorithms=(), **OPTIONS[mode]))
        quantizer = with_table(linears)
        converted, runs, size = {}, {}, 0
        states = [[t.numpy() for t in Functional(cache).state()] for _ in range(2)]
        for name, model, given in _functional(cache, lengths):
            prepared = qompose.prepare_pt2e(torch.export.export(model, given), quantizer)
            module = qompose.convert_pt2e(prepared)
            program = qompose.lower(module, target=target)
            size = program.nbytes
            converted[name] = _stateful(_of_tensors(module), states[0])
            call = _as_a_file(program) if alone else _of_tensors(program)
            runs[name] = _stateful(call, states[1])
        return runs, {"bytes": size, "converted": converted}

    return make


def _llama_cpp(
    cache: int, lengths: dict[str, int], *, four_bits: bool
) -> tuple[dict[str, Run], dict[str, Any]]:
    import llama_cpp_engine  # of packages that are not among those of these benchmarks

    model: Any = float_model(cache)
    run, found = llama_cpp_engine.made(model.model, max(cache, *lengths.values()), four_bits)
    return dict.fromkeys(lengths, run), found


LLAMA_CPP = "llama.cpp Q4_0"
ENGINES: dict[str, Callable[..., tuple[dict[str, Run], dict[str, Any]]]] = {
    "float": _float(compiled=False),
    "float, compiled": _float(compiled=True),
    **{
        f"x86 {mode}{form}": x86(mode, compiled=compiled)
        for mode in ("8", "4", "4 with cache 8", "cache 8", "dynamic 8", "dynamic 8x4")
        for form, compiled in (("", ""), (", compiled", "default"), (", package", "package"))
    },
    **{
        f"{name} {mode}": _xnnpack(mode, target)
        for name, target in (("XNNPACK", "torch"), ("ExecuTorch", "executorch"))
        for mode in OPTIONS
    },
    **{
        f"onnx {mode}, {name}": engine
        for mode in ("8", "4", "dynamic 8")
        for name, engine in (
            ("ONNX Runtime", _onnx(mode, "onnxruntime")),
            ("ONNX Runtime alone", _onnx(mode, "onnxruntime", alone=True)),
            ("OpenVINO", _onnx(mode, "openvino")),
        )
    },
    "OpenVINO int4": _openvino,
    "ONNX Runtime int4": _onnxruntime,
    LLAMA_CPP: partial(_llama_cpp, four_bits=True),
    "llama.cpp float": partial(_llama_cpp, four_bits=False),
}


def generated(runs: dict[str, Run], steps: int) -> Tensor:
    """Logits of a prompt and forced tokens after it, one at a time."""
    parts = [runs["prefill"](*example(PROMPT))]
    parts += [runs["decode"](*example(1, PROMPT + step)).clone() for step in range(steps)]
    return torch.cat([part.float() for part in parts], 1)


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
    _, small = x86(mode, small=True)(PROMPT + STEPS, lengths)
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


def _engine(engine: str, model: str, cache: int) -> tuple[dict[str, Run], dict[str, Any]]:
    return ENGINES[engine](max(cache, *METHODS[model].values()), METHODS[model])


def facts(engine: str, cache: int) -> dict[str, Any]:
    """What an engine's methods take, and how true they are to float and to their Q/DQ form."""
    runs, found = _engine(engine, "decode", cache)
    converted, lowered = found.pop("converted", None), found.pop("lowered", None)
    if lowered is not None and not engine.endswith("package"):  # which is no file of ours
        found["memory"] = memory_of(engine, lowered)
    wanted, actual = generated(_engine("float", "decode", cache)[0], STEPS), generated(runs, STEPS)
    found["sqnr"] = sqnr(wanted, actual)
    if converted is not None:
        simulated = generated(converted, STEPS)
        found["sqnr_of_qdq"], found["to_qdq"] = sqnr(wanted, simulated), sqnr(simulated, actual)
    return found


def work(engine: str, model: str, options: argparse.Namespace) -> tuple[Call, dict[str, Any]]:
    """Make what an engine runs; of facts there is nothing to run."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    if options.facts:
        return int, facts(engine, options.cache)
    runs, found = _engine(engine, model, options.cache)
    calls = list(METHODS[model].items())
    first = 0
    for name, length in calls[:-1]:
        runs[name](*example(length, first))
        first += length
    name, length = calls[-1]
    known = {key: value for key, value in found.items() if key not in ("converted", "lowered")}
    return partial(runs[name], *example(length, first)), known


FLOAT = "float"
COMPARED = (FLOAT, "OpenVINO int4", "ONNX Runtime int4", LLAMA_CPP)


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """The times, tokens in a second, and the speed as a multiple of that of some engines."""
    tokens = [*METHODS[row.model].values()][-1] / row.quantile(5) * 1e3
    others = row.siblings(rows)
    found = (others[name].ratio(row) if name in others else None for name in COMPARED)
    return [*row.times(), f"{tokens:.0f}", *("" if r is None else f"{r:.2f}" for r in found)]


def cells_of_facts(row: Row, rows: Sequence[Row]) -> list[str]:
    """Megabytes, then decibels."""
    by = {"bytes": 1e-6, "memory": 1e-6, "sqnr": 1.0, "sqnr_of_qdq": 1.0, "to_qdq": 1.0}
    return [f"{row.found[name] * n:.1f}" if name in row.found else "" for name, n in by.items()]


COMPARISON = Comparison(
    models=[*METHODS],
    engines=[*ENGINES],
    columns=("ms", "p10", "p90", "tokens/s", *(f"x {name}" for name in COMPARED)),
    compared=COMPARED,
    packages=("qompose", "torch", "transformers", "openvino", "nncf", "onnxruntime"),
    threads=1,
    work=work,
    cells=cells,
)
OF_FACTS = replace(
    COMPARISON,
    columns=("bytes, MB", "process, MB", "SQNR to float, dB", "of the Q/DQ form", "to it"),
    cells=cells_of_facts,
)


def main() -> None:
    parser = COMPARISON.parser(__doc__ or "")
    parser.add_argument(
        "--facts", action="store_true", help="bytes, memory and SQNR in place of times"
    )
    parser.add_argument(
        "--cache",
        type=int,
        default=PROMPT + STEPS,
        help="tokens that the cache has room for, at least (default: %(default)s)",
    )
    parser.add_argument("--load", type=Path, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(loaded(given.load, compiled=given.compiled))
    elif given.facts:
        given.models, given.rounds = ["decode"], 0
        OF_FACTS.run(given)
    else:
        COMPARISON.run(given)


if __name__ == "__main__":
    main()
