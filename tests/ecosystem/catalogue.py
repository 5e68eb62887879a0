# SPDX-License-Identifier: Apache-2.0
"""The quantizers of torchao and ExecuTorch, one row per configuration, and those that cannot be members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.ecosystem import makers

PLAIN, UNGUARDED, STRICT = "plain", "check_guards=False", "strict=True, check_guards=False"
"""How the program must be exported for torchao's engine; ours takes the plain one of every model."""


@dataclass(frozen=True)
class Entry:
    """A quantizer in one configuration.

    Args:
        name: what the tables call it.
        make: returns a new instance; imports its package.
        export: how the stock engine's program must be exported, or it raises or does nothing.
        pairs: whether this configuration stands for its family in the test of all pairs.
        note: what a reader of the table should know.
    """

    name: str
    make: Callable[[], Any]
    export: str = PLAIN
    pairs: bool = False
    note: str = ""

    @property
    def family(self) -> str:
        """The quantizer without its configuration."""
        return self.name.partition(" ")[0]


STAND_IN = "with an empty stand-in for the vendor's compiler"
GROUPS = "group size 16 in place of 128, which must divide the channels"

CATALOGUE = (
    Entry("X86Inductor", partial(makers.inductor, "x86"), pairs=True),
    Entry("X86Inductor dynamic", partial(makers.inductor, "x86", is_dynamic=True)),
    Entry("ArmInductor", partial(makers.inductor, "arm"), pairs=True),
    Entry("XPUInductor", partial(makers.inductor, "xpu"), pairs=True),
    Entry("Embedding", makers.embedding, pairs=True),
    Entry("XNNPACK", makers.xnnpack),
    Entry("XNNPACK per-channel", partial(makers.xnnpack, is_per_channel=True), pairs=True),
    Entry("XNNPACK dynamic", partial(makers.xnnpack, is_per_channel=True, is_dynamic=True), pairs=True),
    Entry(
        "XNNPACK dynamic 4-bit",
        partial(makers.xnnpack, is_per_channel=True, is_dynamic=True, weight_qmin=-8, weight_qmax=7),
    ),
    Entry("XNNPACK(torchao)", makers.xnnpack_of_torchao, note="the copy for torchao's own tests"),
    Entry("Vulkan weight-only", makers.vulkan, pairs=True),
    Entry("Vulkan dynamic", partial(makers.vulkan, is_dynamic=True), pairs=True),
    Entry("Vulkan weight-only 4-bit", partial(makers.vulkan, weight_bits=4)),
    Entry("CoreML", makers.coreml, pairs=True),
    Entry("TOSA", makers.tosa, UNGUARDED, pairs=True),
    Entry("TOSA V1", partial(makers.tosa, use_composable_quantizer=False), UNGUARDED,
          note="its first implementation, deprecated"),
    Entry("TOSA a16w8", partial(makers.tosa, "TOSA-1.0+INT+int16", "a16w8"), UNGUARDED),
    Entry("EthosU", makers.ethos_u, UNGUARDED),
    Entry("VGF", makers.vgf, UNGUARDED),
    Entry("CortexM", makers.cortex_m, UNGUARDED, pairs=True),
    Entry("CortexM explicit-layout", partial(makers.cortex_m, use_explicit_layout=True), UNGUARDED),
    Entry("OpenVINO INT8_SYM", partial(makers.openvino, "INT8_SYM"), pairs=True),
    Entry("OpenVINO INT8_MIXED", partial(makers.openvino, "INT8_MIXED")),
    Entry("OpenVINO INT8_TRANSFORMER", partial(makers.openvino, "INT8_TRANSFORMER")),
    Entry("OpenVINO INT8WO_SYM", partial(makers.openvino, "INT8WO_SYM"), pairs=True),
    Entry("OpenVINO INT8WO_ASYM", partial(makers.openvino, "INT8WO_ASYM")),
    Entry("OpenVINO INT4WO_SYM", partial(makers.openvino, "INT4WO_SYM", group_size=16), note=GROUPS),
    Entry("OpenVINO INT4WO_ASYM", partial(makers.openvino, "INT4WO_ASYM", group_size=16), note=GROUPS),
    Entry("Cadence Default", partial(makers.cadence, "Default"), STRICT, pairs=True),
    Entry("Cadence WakeWord", partial(makers.cadence, "WakeWord"), STRICT),
    Entry("Cadence FusedConvRelu", partial(makers.cadence, "FusedConvRelu"), STRICT),
    Entry("Cadence WithLayerNorm", partial(makers.cadence, "WithLayerNorm"), STRICT),
    Entry("Cadence WithSoftmax", partial(makers.cadence, "WithSoftmax"), STRICT),
    Entry("Cadence A16Linear", partial(makers.cadence, "With16BitLinearActivations"), STRICT),
    Entry("Cadence A16Conv", partial(makers.cadence, "With16BitConvActivations"), STRICT),
    Entry("Cadence A16Matmul", partial(makers.cadence, "With16BitMatmulActivations"), STRICT),
    Entry("Cadence W8A32", partial(makers.cadence, "W8A32Mixed"), STRICT),
    Entry("Cadence RmsNormNop", partial(makers.cadence, "RmsNormNop"), STRICT),
    Entry("Cadence Nop", partial(makers.cadence, "Nop"), STRICT, note="for float runs"),
    Entry("QNN 8a8w", makers.qnn, pairs=True),
    Entry("QNN 8a8w per-channel",
          partial(makers.qnn, is_conv_per_channel=True, is_linear_per_channel=True)),
    Entry("QNN 16a4w",
          partial(makers.qnn, "use_16a4w", is_conv_per_channel=True, is_linear_per_channel=True)),
    Entry("Samsung", makers.samsung, pairs=True),
    Entry("MediaTek", makers.mediatek, pairs=True, note=STAND_IN),
    Entry("NXP", makers.nxp, STRICT, pairs=True, note=STAND_IN),
    Entry("Example", makers.example, pairs=True),
)  # fmt: skip

BY_NAME = {entry.name: entry for entry in CATALOGUE}

NO_MEMBERS = {
    "executorch.backends.apple.coreai.quantizer.CoreAIQuantizer": (
        "no quantizer of this flow: it takes the module, exports and converts by itself, with coreai_opt, "
        "and has no annotate"
    ),
    "coremltools.optimize.torch.quantization._coreml_quantizer.CoreMLQuantizer": (
        "does not import: torch.ao.quantization.quantizer is gone from torch 2.13; ExecuTorch has a port"
    ),
    "nncf.experimental.torch.fx.OpenVINOQuantizer": "gone from nncf 3; ExecuTorch has it",
}
"""What is named a quantizer and cannot be a member, with the reason."""
