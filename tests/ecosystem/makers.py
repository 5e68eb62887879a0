# SPDX-License-Identifier: Apache-2.0
"""How each quantizer of the ecosystem is made, as its users make it.

Every function imports its package when it is called: several of these imports change the process (CoreML's
and Arm's put variables into `os.environ`, QNN's constructor switches oneDNN off on some processors), and each
costs seconds.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import warnings
from typing import Any

import pytest
import torch

from tests.ecosystem.vendors import MEDIATEK, neutron_target, stand_in

for name in ("torchao", "executorch"):
    pytest.importorskip(name)

TORCHAO = "torchao.quantization.pt2e.quantizer"
EXECUTORCH = "executorch.backends"


def _imported(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they warn about themselves while they are imported
        return importlib.import_module(module)


def inductor(kind: str, **options: Any) -> Any:
    """torchao's quantizer for Inductor on "x86", "arm" or "xpu", with the default configuration."""
    module = _imported(f"{TORCHAO}.{kind}_inductor_quantizer")
    quantizer = {"x86": "X86", "arm": "Arm", "xpu": "XPU"}[kind] + "InductorQuantizer"
    config = getattr(module, f"get_default_{kind}_inductor_quantization_config")(**options)
    return getattr(module, quantizer)().set_global(config)


def embedding() -> Any:
    return _imported(f"{TORCHAO}.embedding_quantizer").EmbeddingQuantizer()


def xnnpack(**options: Any) -> Any:
    remember_xnnpack_patterns()
    module = _imported(f"{EXECUTORCH}.xnnpack.quantizer.xnnpack_quantizer")
    return module.XNNPACKQuantizer().set_global(module.get_symmetric_quantization_config(**options))


@functools.cache
def remember_xnnpack_patterns() -> None:
    """Let XNNPACK's quantizer export its patterns once in a process, not for seconds at each annotate."""
    module = _imported(f"{EXECUTORCH}.xnnpack.quantizer.xnnpack_quantizer_utils")
    export, made = module._get_aten_graph_module_for_pattern, {}

    def remembered(pattern: Any, inputs: tuple[Any, ...], is_cuda: bool) -> Any:
        known = [cell.cell_contents for cell in pattern.fn.__closure__]
        key = (pattern.fn.__qualname__, is_cuda, *known, *(x.shape for x in inputs))
        if key not in made:
            made[key] = export(pattern, inputs, is_cuda)
        return copy.deepcopy(made[key])  # a matcher changes the pattern

    module._get_aten_graph_module_for_pattern = remembered


def xnnpack_of_torchao() -> Any:
    """The copy that torchao keeps for its own tests."""
    module = _imported("torchao.testing.pt2e._xnnpack_quantizer")
    return module.XNNPACKQuantizer().set_global(module.get_symmetric_quantization_config())


def vulkan(**options: Any) -> Any:
    module = _imported(f"{EXECUTORCH}.vulkan.quantizer.vulkan_quantizer")
    return module.VulkanQuantizer().set_global(module.get_symmetric_quantization_config(**options))


def tosa(specification: str = "TOSA-1.0+INT", config: str = "", **options: Any) -> Any:
    """Arm's; `config` is "" or "a16w8", `options` go to the quantizer."""
    arm = _imported(f"{EXECUTORCH}.arm.quantizer")
    specifications = _imported(f"{EXECUTORCH}.arm.tosa.specification").TosaSpecification
    quantizer = arm.TOSAQuantizer(specifications.create_from_string(specification), **options)
    return quantizer.set_global(_arm_config(arm, config))


def ethos_u() -> Any:
    arm = _imported(f"{EXECUTORCH}.arm.quantizer")
    spec = _imported(f"{EXECUTORCH}.arm.ethosu").EthosUCompileSpec("ethos-u55-128")
    return arm.EthosUQuantizer(spec).set_global(_arm_config(arm))


def vgf() -> Any:
    arm = _imported(f"{EXECUTORCH}.arm.quantizer")
    spec = _imported(f"{EXECUTORCH}.arm.vgf").VgfCompileSpec()
    return arm.VgfQuantizer(spec).set_global(_arm_config(arm))


def _arm_config(arm: Any, kind: str = "") -> Any:
    infix = f"{kind}_" if kind else ""
    return getattr(arm, f"get_symmetric_{infix}quantization_config")()


def cortex_m(**options: Any) -> Any:
    return _imported(f"{EXECUTORCH}.cortex_m.quantizer.quantizer").CortexMQuantizer(**options)


def openvino(mode: str, **options: Any) -> Any:
    module = _imported(f"{EXECUTORCH}.openvino.quantizer.quantizer")
    return module.OpenVINOQuantizer(mode=module.QuantizationMode[mode], **options)


def coreml() -> Any:
    _remember_coreml_patterns()
    quantizer = _imported(f"{EXECUTORCH}.apple.coreml.quantizer").CoreMLQuantizer
    configs = _imported("coremltools.optimize.torch.quantization").LinearQuantizerConfig
    return quantizer(configs.from_dict({"global_config": {"quantization_scheme": "symmetric"}}))


_COREML_PATTERNS = (
    "get_binary_op_act_pattern", "get_conv_pattern", "get_conv_bn_pattern", "get_linear_pattern",
    "get_linear_bn_pattern",
)  # fmt: skip


@functools.cache
def _remember_coreml_patterns() -> None:
    """Let CoreML's functions that export a pattern export it once in a process.

    It exports 405 patterns at each call of annotate, which is half a minute for a model of any size. Each
    caller gets a copy, since a matcher changes the pattern that it is made of.
    """
    module = _imported(f"{EXECUTORCH}.apple.coreml.quantizer._coreml_quantizer_utils")
    for name in _COREML_PATTERNS:
        setattr(module, name, _remembered(getattr(module, name)))


def _remembered(function: Any) -> Any:
    once = functools.cache(function)
    return lambda *args, **options: copy.deepcopy(once(*args, **options))


def qnn(dtype: str = "use_8a8w", **options: Any) -> Any:
    """Qualcomm's, told that there is no SDK: it would download one. On AMD it switches oneDNN off."""
    os.environ.setdefault("QNN_SDK_ROOT", "")
    module = _imported(f"{EXECUTORCH}.qualcomm.quantizer.quantizer")
    enabled = torch.backends.mkldnn.enabled
    quantizer = module.QnnQuantizer()
    torch.backends.mkldnn.enabled = enabled
    quantizer.set_default_quant_config(module.QuantDtype[dtype], **options)
    return quantizer


def samsung() -> Any:
    return _imported(f"{EXECUTORCH}.samsung.quantizer").EnnQuantizer()


def cadence(kind: str) -> Any:
    module = _imported(f"{EXECUTORCH}.cadence.aot.quantizer.quantizer")
    return getattr(module, f"Cadence{kind}Quantizer")()


def example() -> Any:
    return _imported(f"{EXECUTORCH}.example.example_quantizer").ExampleQuantizer()


def mediatek() -> Any:
    stand_in(*MEDIATEK)
    return _imported(f"{EXECUTORCH}.mediatek.quantizer").NeuropilotQuantizer()


def nxp() -> Any:
    target = neutron_target()
    return _imported(f"{EXECUTORCH}.nxp.quantizer.neutron_quantizer").NeutronQuantizer(target)
