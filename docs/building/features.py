# SPDX-License-Identifier: Apache-2.0
"""Features beside those of peers, as their code and documentation have them, and the tests that show ours.

Marks: Y has it, P in part (in one backend, for other formats, or with a gap), N has it not, ? not looked at.
The order of the marks is that of `PEERS`.
"""

from __future__ import annotations

from dataclasses import dataclass

# What was read, and partly run; later versions may have more.
PEERS: dict[str, str] = {
    "torchao": "its PT2E flow, 0.19",
    "ExecuTorch": "its quantizers, those of all backends, main of August 2026",
    "NNCF": "3.4, its way through torch.fx",
    "ONNX Runtime": "onnxruntime.quantization 1.31",
    "torch.ao": "FX graph mode, as torch 2.13 has it",
    "Neural Compressor": "its PT2E part, main of August 2026",
    "AIMET": "2.0 before its release, October 2024",
    "Quark": "0.12",
    "Apple": "coremltools 9.0 and coreai-opt, main of June 2026",
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
            "a test suite that authors of backends run on theirs",
            "Y",
            "N P N N P N N N N",
            "core/testing/test_testing.py",
            "ExecuTorch ships one for lowering to a backend; its flows are listed in its own tree",
        ),
        Feature(
            "quantizers composed in an order",
            "Y",
            "P Y N N N P N N N",
            "composed/test_composition.py",
            "torchao's composition calls neither the members' validate nor their callbacks",
        ),
        Feature(
            "conflicts between them named, with both sides",
            "Y",
            "P P N N P N Y N N",
            "core/quantizer/test_annotations.py",
        ),
        Feature(
            "kernels for GPUs and accelerators",
            "N",
            "P Y Y Y N P P P Y",
            note="qompose brings kernels for CPUs; plugins may bring others, and none exists yet",
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
            "the same of a composition",
            "Y",
            "N N N N N N N N N",
            "core/backend/test_capabilities.py",
        ),
        Feature(
            "bounds of integers and scales that a backend declares, and configurations are held to",
            "Y",
            "N P P N Y N P N P",
            "core/backend/test_constraints.py",
            "ExecuTorch's Qualcomm backend reads them from the vendor's library, and warns",
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
            "by regular expression of module names",
            "Y",
            "N P Y P Y P N P Y",
            "core/spec/test_selectors.py",
        ),
        Feature(
            "by module, operator and number of the call",
            "Y",
            "N N N N Y N N N P",
            "core/spec/test_selectors.py",
        ),
        Feature(
            "a name that matches nothing is an error",
            "Y",
            "? N Y ? ? ? ? ? ?",
            "core/spec/test_selectors.py",
        ),
    ),
    "Numbers": (
        Feature(
            "parameters that tensors share, over several operators too",
            "Y",
            "Y Y P P P Y P P Y",
            "core/plan/test_planning.py",
        ),
        Feature(
            "parameters derived from those of other tensors, as of a bias",
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
            "weights alone, eight and four bits in groups",
            "Y",
            "P P Y Y P Y Y Y Y",
            "x86_inductor/operators/test_linear_weight_only.py",
            "by rounding; methods for large language models are below",
        ),
        Feature(
            "16-bit activations",
            "P",
            "P P P Y N N Y Y P",
            "ecosystem/test_table.py",
            "the engine takes them from other quantizers; no backend of ours has a kernel",
        ),
        Feature("float8 and block floating point", "N", "P P P Y N Y Y Y Y"),
        Feature(
            "percentiles, entropy and least error for the range of activations",
            "Y",
            "P P P Y P P Y Y P",
            "core/observers/test_range_search.py",
        ),
        Feature(
            "calibration in several processes, with the bits of one",
            "Y",
            "P N N P ? ? Y ? Y",
            "examples/test_distributed.py",
            "of the peers, whether they calibrate in several processes at all",
        ),
    ),
    "Programs": (
        Feature(
            "bodies of cond, while_loop, scan and map",
            "Y",
            "P P N P N N N N N",
            "composed/test_control_flow.py",
        ),
        Feature(
            "dynamic shapes kept",
            "Y",
            "P P P Y Y Y N Y Y",
            "core/preparation/test_zoo.py",
        ),
        Feature(
            "integers in mutable buffers, such as key-value caches",
            "P",
            "P P N N N ? ? Y P",
            "core/program/test_hidden_writes.py",
            "such models stay right; the buffers themselves stay in float",
        ),
        Feature(
            "arithmetic spelled out in integer operators",
            "Y",
            "Y Y N Y Y Y N N N",
            "core/conversion/test_representation.py",
        ),
        Feature(
            "quantized models as files, with how they were quantized",
            "Y",
            "P P P P P Y Y Y Y",
            "core/storage/test_artefact.py",
            "ours hold no code, and loading runs none",
        ),
    ),
    "Training": (
        Feature(
            "batch norms trained as they will be folded",
            "Y",
            "P P N N Y P P Y Y",
            "core/training/test_training.py",
            "torchao's puts an eps of 1e-5 and a momentum of 0.1 in the place of the model's own",
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
            "error of each operator, of a float and a quantized model",
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
            "a target of accuracy met by leaving operators in float",
            "Y",
            "N N P P N Y Y ? N",
            "core/diagnosis/test_tuning.py",
            "NNCF does so for its other formats",
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
        Feature("learned rounding (AdaRound, AutoRound)", "N", "N N N N N Y Y ? N"),
        Feature(
            "GPTQ, AWQ and their kind, for large language models",
            "P",
            "N N Y P N Y P Y P",
            "core/algorithms/test_awq.py",
            "not layer by layer with the inputs of the quantized layers before it",
        ),
    ),
    "Tools": (
        Feature("a command line", "Y", "N N N Y N N N Y N", "composed/test_command_line.py"),
        Feature(
            "a report for browsers",
            "Y",
            "N N P P Y N Y Y P",
            "core/reporting/test_page.py",
        ),
    ),
}
