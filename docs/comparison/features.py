# SPDX-License-Identifier: Apache-2.0
"""Features beside those of peers, as their code and documentation have them, and the tests that show ours.

Marks: Y has it, P in part (in one backend, for other formats, or with a gap), N has it not, ? not looked at.
The order of the marks is that of `PEERS`.
"""

from __future__ import annotations

from dataclasses import dataclass

# What was read, and partly run; later versions may have more.
PEERS: dict[str, str] = {
    "torchao": "PT2E, 0.18",
    "ExecuTorch": "quantizers of all backends, August 2026",
    "NNCF": "torch.fx backend, 3.4",
    "ONNX Runtime": "1.31",
    "torch.ao": "FX graph mode, torch 2.13",
    "Neural Compressor": "PT2E part, August 2026",
    "AIMET": "pre-2.0, October 2024",
    "Quark": "0.12",
    "Apple": "coremltools 9.0, coreai-opt, June 2026",
}
MARKS = {"Y": "yes", "P": "part", "N": "no", "?": "?"}


@dataclass(frozen=True)
class Feature:
    """One line of the table.

    Attributes:
        name: what it is.
        ours: the mark of qompose.
        peers: the marks of the peers, with blanks between.
        test: what shows ours, a file below tests/; "" where we have nothing.
        note: what a mark of ours or of a peer leaves open.
    """

    name: str
    ours: str
    peers: str
    test: str = ""
    note: str = ""


FEATURES: dict[str, tuple[Feature, ...]] = {
    "Backends": (
        Feature(
            "backends that are pip packages, found by entry points",
            "Y",
            "N N N N N N N N P",
            "test_packaging.py",
        ),
        Feature(
            "a test suite for authors of backends",
            "Y",
            "N P N N P N N N N",
            "core/testing/test_testing.py",
            "ExecuTorch's is for lowering, within its own tree",
        ),
        Feature(
            "composition of quantizers in order of priority",
            "Y",
            "P Y N N N P N N N",
            "composed/test_composition.py",
            "torchao calls neither validate nor callbacks of members",
        ),
        Feature(
            "conflicts named with both sides",
            "Y",
            "P P N N P N Y N N",
            "core/quantizer/test_annotations.py",
        ),
        Feature(
            "kernels for GPUs and accelerators",
            "N",
            "P Y Y Y N P P P Y",
            note="CPU kernels only; plugins may bring others, none exists yet",
        ),
    ),
    "Questions": (
        Feature(
            "what a backend can quantize, as data",
            "Y",
            "N P P P Y P P P P",
            "composed/test_capabilities.py",
            "Apple's coreai-opt answers of a model, not of a backend",
        ),
        Feature(
            "declared bounds of integers and scales, enforced",
            "Y",
            "N P P N Y N P N P",
            "core/backend/test_constraints.py",
            "ExecuTorch: Qualcomm's, which warns",
        ),
        Feature(
            "why an operator is not quantized",
            "Y",
            "N P P P P P P P Y",
            "core/diagnosis/test_inquiry.py",
        ),
    ),
    "Configuration": (
        Feature(
            "configuration by regular expression of module names",
            "Y",
            "N P Y P Y P N P Y",
            "core/spec/test_selectors.py",
        ),
        Feature(
            "configuration by module, operator and call number",
            "Y",
            "N N N N Y N N N P",
            "core/spec/test_selectors.py",
        ),
        Feature(
            "unknown names are an error",
            "Y",
            "? N Y ? ? ? ? ? ?",
            "core/spec/test_selectors.py",
        ),
    ),
    "Numbers": (
        Feature(
            "parameters shared by tensors, across operators",
            "Y",
            "Y Y P P P Y P P Y",
            "core/plan/test_planning.py",
        ),
        Feature(
            "parameters derived from other tensors, as for a bias",
            "Y",
            "Y Y N Y P Y N P N",
            "core/plan/test_planning.py",
        ),
        Feature(
            "dynamic activations",
            "Y",
            "Y Y N Y Y Y ? Y P",
            "xnnpack/operators/test_linear.py",
        ),
        Feature(
            "weight-only, 8 bits and 4 bits in groups",
            "Y",
            "P P Y Y P Y Y Y Y",
            "x86_inductor/operators/test_linear_weight_only.py",
        ),
        Feature(
            "16-bit activations",
            "P",
            "P P P Y N N Y Y P",
            "ecosystem/test_table.py",
            "accepted from other quantizers; no kernel",
        ),
        Feature(
            "float8 and block floating point",
            "P",
            "P P P Y N Y Y Y Y",
            "x86_inductor/rules/test_float8.py",
            "float8 linears on x86, summed in float32",
        ),
        Feature(
            "percentile, entropy and least-error ranges",
            "Y",
            "P P P Y P P Y Y P",
            "core/observers/test_range_search.py",
        ),
        Feature(
            "distributed calibration, bit-identical to one process",
            "Y",
            "P N N P ? ? Y ? Y",
            "examples/test_distributed.py",
            "peers: distributed calibration at all",
        ),
    ),
    "Programs": (
        Feature(
            "quantizes bodies of cond, while_loop, scan and map",
            "Y",
            "P P N P N N N N N",
            "composed/test_control_flow.py",
        ),
        Feature(
            "keeps dynamic shapes",
            "Y",
            "P P P Y Y Y N Y Y",
            "core/preparation/test_zoo.py",
        ),
        Feature(
            "integer mutable buffers, such as key-value caches",
            "P",
            "P P N N N ? ? Y P",
            "x86_inductor/rules/test_cache.py",
            "on x86; elsewhere in float",
        ),
        Feature(
            "integer reference representation",
            "Y",
            "Y Y N Y Y Y N N N",
            "core/conversion/test_representation.py",
        ),
        Feature(
            "saves quantized models with their plan",
            "Y",
            "P P P P P Y Y Y Y",
            "core/storage/test_artefact.py",
            "loading ours runs no code",
        ),
    ),
    "Training": (
        Feature(
            "QAT with folded batch norms",
            "Y",
            "P P N N Y P P Y Y",
            "core/training/test_training.py",
            "torchao replaces the model's eps and momentum by constants",
        ),
        Feature(
            "learned scales",
            "Y",
            "Y N P N P N Y Y Y",
            "core/training/test_training.py",
        ),
        Feature(
            "schedules of observers and batch norms",
            "Y",
            "P P N N Y N Y P Y",
            "core/training/test_train_eval.py",
        ),
    ),
    "Accuracy": (
        Feature(
            "error of each operator against float",
            "Y",
            "Y Y N Y Y P Y Y P",
            "composed/test_comparing.py",
        ),
        Feature(
            "sensitivity of each operator",
            "Y",
            "N N Y N P N Y ? P",
            "core/diagnosis/test_sensitivity.py",
        ),
        Feature(
            "accuracy-aware fallback to float",
            "Y",
            "N N P P N Y Y ? N",
            "core/diagnosis/test_tuning.py",
            "NNCF: in its other formats",
        ),
        Feature(
            "SmoothQuant on the exported graph",
            "Y",
            "N N Y P N P ? Y ?",
            "core/algorithms/test_smoothing.py",
        ),
        Feature(
            "cross-layer equalization",
            "Y",
            "N N P N Y N Y Y N",
            "core/algorithms/test_equalization.py",
        ),
        Feature(
            "bias correction",
            "Y",
            "N N Y N Y N Y P N",
            "core/algorithms/test_correction.py",
        ),
        Feature(
            "learned rounding (AdaRound, AutoRound)",
            "Y",
            "N N N N N Y Y ? N",
            "core/algorithms/test_sign_round.py",
        ),
        Feature(
            "GPTQ, AWQ and their kind, for large language models",
            "Y",
            "N N Y P N Y P Y P",
            "core/algorithms/test_awq.py",
        ),
    ),
    "Tools": (
        Feature(
            "a report for browsers",
            "Y",
            "N N P P Y N Y Y P",
            "core/reporting/test_page.py",
        ),
    ),
}
