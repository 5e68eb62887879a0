# SPDX-License-Identifier: Apache-2.0
"""Composable int8 quantization for PyTorch 2: quantizers are plugins, and compose.

Names are imported when they are first used, so `import qompose` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qompose.backend import Backend, CallSignature, Finished, Target
    from qompose.calibration import calibrate
    from qompose.capabilities import Capabilities, Capability, Support
    from qompose.errors import (
        AnnotationConflictError,
        BackendNotFoundError,
        CalibrationError,
        ConfigError,
        InternalError,
        NotExportedError,
        NothingQuantizedError,
        NotLoweredError,
        PluginError,
        QomposeError,
        QomposeWarning,
        SelectorError,
        SharingError,
        StageError,
        TargetError,
        UncalibratedError,
        UserError,
    )
    from qompose.hookspecs import API_VERSION, hookimpl
    from qompose.observers import (
        FixedQParamsObserver,
        HistogramObserver,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        PerChannelMinMaxObserver,
        PlaceholderObserver,
        observer_for_range,
    )
    from qompose.patterns import Match, OperatorPattern, Pattern
    from qompose.pipeline import (
        QuantizedModel,
        compose,
        convert_pt2e,
        lower,
        prepare_pt2e,
        quantize,
    )
    from qompose.plan import Plan
    from qompose.plugins import BackendInfo, backends, load_backend
    from qompose.quantizer import ComposableQuantizer, Quantizer, RuleQuantizer
    from qompose.region import QuantizedTensor, Region, on_integers
    from qompose.reporting import Report, report
    from qompose.rules import Kernel, NotLowerable, Rule, TensorConstraint
    from qompose.specs import (
        DerivedQuantizationSpec,
        FixedQParamsQuantizationSpec,
        QuantizationAnnotation,
        QuantizationConfig,
        QuantizationSpec,
        SharedQuantizationSpec,
        annotate_input_qspec_map,
        annotate_output_qspec,
    )

_MODULES = {
    "backend": "Backend CallSignature Finished Target",
    "calibration": "calibrate",
    "capabilities": "Capabilities Capability Support",
    "errors": (
        "AnnotationConflictError BackendNotFoundError CalibrationError ConfigError InternalError "
        "NotExportedError NothingQuantizedError NotLoweredError PluginError QomposeError QomposeWarning "
        "SelectorError SharingError StageError TargetError UncalibratedError UserError"
    ),
    "hookspecs": "API_VERSION hookimpl",
    "observers": (
        "FixedQParamsObserver HistogramObserver MinMaxObserver MovingAverageMinMaxObserver "
        "MovingAveragePerChannelMinMaxObserver PerChannelMinMaxObserver PlaceholderObserver "
        "observer_for_range"
    ),
    "patterns": "Match OperatorPattern Pattern",
    "pipeline": "QuantizedModel compose convert_pt2e lower prepare_pt2e quantize",
    "plan": "Plan",
    "plugins": "BackendInfo backends load_backend",
    "quantizer": "ComposableQuantizer Quantizer RuleQuantizer",
    "region": "QuantizedTensor Region on_integers",
    "reporting": "Report report",
    "rules": "Kernel NotLowerable Rule TensorConstraint",
    "specs": (
        "DerivedQuantizationSpec FixedQParamsQuantizationSpec QuantizationAnnotation QuantizationConfig "
        "QuantizationSpec SharedQuantizationSpec annotate_input_qspec_map annotate_output_qspec"
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib_metadata import version

        return version("qompose")
    if name not in _HOME:
        raise AttributeError(f"module 'qompose' has no attribute {name!r}")
    return getattr(import_module(f"qompose.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
