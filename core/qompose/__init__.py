# SPDX-License-Identifier: Apache-2.0
"""Composable int8 quantization for PyTorch 2: quantizers are plugins, and compose.

Names are imported when they are first used, so `import qompose` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qompose.artefact import load as load
    from qompose.artefact import save as save
    from qompose.backend import Backend as Backend
    from qompose.backend import CallSignature as CallSignature
    from qompose.backend import Finished as Finished
    from qompose.backend import LateOperators as LateOperators
    from qompose.backend import RuleUse as RuleUse
    from qompose.backend import Target as Target
    from qompose.benchmarking import Timings as Timings
    from qompose.benchmarking import bench as bench
    from qompose.calibration import calibrate as calibrate
    from qompose.capabilities import Capabilities as Capabilities
    from qompose.capabilities import Support as Support
    from qompose.capability_row import Capability as Capability
    from qompose.collecting import Statistics as Statistics
    from qompose.collecting import statistics as statistics
    from qompose.compiling import CompiledModel as CompiledModel
    from qompose.compiling import compile_lowered as compile_lowered
    from qompose.composing import compose as compose
    from qompose.composing import quantizer_from_dict as quantizer_from_dict
    from qompose.composing import quantizer_from_json as quantizer_from_json
    from qompose.composing import quantizer_of as quantizer_of
    from qompose.composition import ComposableQuantizer as ComposableQuantizer
    from qompose.configs import config_from_json as config_from_json
    from qompose.configs import config_to_json as config_to_json
    from qompose.configs import spec_from_json as spec_from_json
    from qompose.configs import spec_to_json as spec_to_json
    from qompose.constraints import TensorConstraint as TensorConstraint
    from qompose.diagnosis.comparing import compare as compare
    from qompose.diagnosis.comparison import Compared as Compared
    from qompose.diagnosis.comparison import Comparison as Comparison
    from qompose.diagnosis.sensitivity import Sensitivity as Sensitivity
    from qompose.diagnosis.sensitivity import SiteCost as SiteCost
    from qompose.diagnosis.sensitivity import sensitivity as sensitivity
    from qompose.diagnosis.tuned import Tuning as Tuning
    from qompose.diagnosis.tuning import tune as tune
    from qompose.errors import AnnotationConflictError as AnnotationConflictError
    from qompose.errors import ArtefactError as ArtefactError
    from qompose.errors import BackendNotFoundError as BackendNotFoundError
    from qompose.errors import CalibrationError as CalibrationError
    from qompose.errors import CompilationError as CompilationError
    from qompose.errors import ConfigError as ConfigError
    from qompose.errors import ExcludedBackendError as ExcludedBackendError
    from qompose.errors import InputError as InputError
    from qompose.errors import InternalError as InternalError
    from qompose.errors import MemberError as MemberError
    from qompose.errors import MissingBackendError as MissingBackendError
    from qompose.errors import NotExportedError as NotExportedError
    from qompose.errors import NothingQuantizedError as NothingQuantizedError
    from qompose.errors import NotLoweredError as NotLoweredError
    from qompose.errors import PluginError as PluginError
    from qompose.errors import ProjectError as ProjectError
    from qompose.errors import QomposeError as QomposeError
    from qompose.errors import QomposeWarning as QomposeWarning
    from qompose.errors import RequirementError as RequirementError
    from qompose.errors import RequirementWarning as RequirementWarning
    from qompose.errors import SelectorError as SelectorError
    from qompose.errors import SharingError as SharingError
    from qompose.errors import StageError as StageError
    from qompose.errors import StatisticsError as StatisticsError
    from qompose.errors import TargetError as TargetError
    from qompose.errors import TuningError as TuningError
    from qompose.errors import UncalibratedError as UncalibratedError
    from qompose.errors import UserError as UserError
    from qompose.exported_modes import (
        allow_exported_model_train_eval as allow_exported_model_train_eval,
    )
    from qompose.exported_modes import move_exported_model_to_eval as move_exported_model_to_eval
    from qompose.exported_modes import move_exported_model_to_train as move_exported_model_to_train
    from qompose.fake_quantize import FakeQuantize as FakeQuantize
    from qompose.fake_quantize import FixedQParamsFakeQuantize as FixedQParamsFakeQuantize
    from qompose.fake_quantize import FusedMovingAvgObsFakeQuantize as FusedMovingAvgObsFakeQuantize
    from qompose.histogram_observers import EntropyObserver as EntropyObserver
    from qompose.histogram_observers import HistogramObserver as HistogramObserver
    from qompose.histogram_observers import PercentileObserver as PercentileObserver
    from qompose.histogram_observers import (
        PerChannelHistogramObserver as PerChannelHistogramObserver,
    )
    from qompose.histogram_observers import observer_for_range as observer_for_range
    from qompose.histogram_observers import weight_observer_for_range as weight_observer_for_range
    from qompose.hookspecs import API_VERSION as API_VERSION
    from qompose.hookspecs import hookimpl as hookimpl
    from qompose.inquiry import NodeSupport as NodeSupport
    from qompose.inquiry import can_quantize as can_quantize
    from qompose.learned import LearnableFakeQuantize as LearnableFakeQuantize
    from qompose.ledger import Report as Report
    from qompose.ledger import Row as Row
    from qompose.observers import FixedQParamsObserver as FixedQParamsObserver
    from qompose.observers import MinMaxObserver as MinMaxObserver
    from qompose.observers import MovingAverageMinMaxObserver as MovingAverageMinMaxObserver
    from qompose.observers import (
        MovingAveragePerChannelMinMaxObserver as MovingAveragePerChannelMinMaxObserver,
    )
    from qompose.observers import PerBlockMinMaxObserver as PerBlockMinMaxObserver
    from qompose.observers import PerChannelMinMaxObserver as PerChannelMinMaxObserver
    from qompose.observers import PlaceholderObserver as PlaceholderObserver
    from qompose.operators import ORDER_PRESERVING as ORDER_PRESERVING
    from qompose.operators import SCALE_PRESERVING as SCALE_PRESERVING
    from qompose.operators import VALUE_PRESERVING as VALUE_PRESERVING
    from qompose.patterns import Match as Match
    from qompose.patterns import OperatorPattern as OperatorPattern
    from qompose.patterns import Pattern as Pattern
    from qompose.pipeline import convert_pt2e as convert_pt2e
    from qompose.pipeline import lower as lower
    from qompose.pipeline import prepare_pt2e as prepare_pt2e
    from qompose.pipeline import prepare_qat_pt2e as prepare_qat_pt2e
    from qompose.plan import Plan as Plan
    from qompose.plugins import BackendInfo as BackendInfo
    from qompose.plugins import backends as backends
    from qompose.plugins import load_backend as load_backend
    from qompose.quantized_tensors import DynamicTensor as DynamicTensor
    from qompose.quantized_tensors import QuantizedTensor as QuantizedTensor
    from qompose.quantizer import Quantizer as Quantizer
    from qompose.quantizing import QuantizedModel as QuantizedModel
    from qompose.quantizing import quantize as quantize
    from qompose.region import Region as Region
    from qompose.region import on_integers as on_integers
    from qompose.repairs.words import SmoothQuant as SmoothQuant
    from qompose.reporting import assert_lowered as assert_lowered
    from qompose.reporting import assert_quantized as assert_quantized
    from qompose.reporting import report as report
    from qompose.roles import ObserverOrFakeQuantize as ObserverOrFakeQuantize
    from qompose.roles import OperatorConfig as OperatorConfig
    from qompose.roles import OperatorPatternType as OperatorPatternType
    from qompose.roles import annotate_input_qspec_map as annotate_input_qspec_map
    from qompose.roles import annotate_output_qspec as annotate_output_qspec
    from qompose.roles import get_bias_qspec as get_bias_qspec
    from qompose.roles import get_input_act_qspec as get_input_act_qspec
    from qompose.roles import get_module_name_filter as get_module_name_filter
    from qompose.roles import get_output_act_qspec as get_output_act_qspec
    from qompose.roles import get_weight_qspec as get_weight_qspec
    from qompose.roles import is_valid_annotation as is_valid_annotation
    from qompose.rule_quantizer import RuleQuantizer as RuleQuantizer
    from qompose.rules import Guard as Guard
    from qompose.rules import Kernel as Kernel
    from qompose.rules import NotLowerable as NotLowerable
    from qompose.rules import Rule as Rule
    from qompose.scaffolding import new_backend as new_backend
    from qompose.schedules import QATSchedule as QATSchedule
    from qompose.schedules import disable_fake_quant as disable_fake_quant
    from qompose.schedules import disable_observer as disable_observer
    from qompose.schedules import enable_fake_quant as enable_fake_quant
    from qompose.schedules import enable_observer as enable_observer
    from qompose.schedules import freeze_batch_norm as freeze_batch_norm
    from qompose.schedules import unfreeze_batch_norm as unfreeze_batch_norm
    from qompose.specs import DerivedQuantizationSpec as DerivedQuantizationSpec
    from qompose.specs import EdgeOrNode as EdgeOrNode
    from qompose.specs import FixedQParamsQuantizationSpec as FixedQParamsQuantizationSpec
    from qompose.specs import QuantizationAnnotation as QuantizationAnnotation
    from qompose.specs import QuantizationConfig as QuantizationConfig
    from qompose.specs import QuantizationSpec as QuantizationSpec
    from qompose.specs import QuantizationSpecBase as QuantizationSpecBase
    from qompose.specs import SharedQuantizationSpec as SharedQuantizationSpec
    from qompose.training_specs import training_config as training_config
    from qompose.usual_specs import activation_spec as activation_spec
    from qompose.usual_specs import weight_spec as weight_spec

_MODULES = {
    "artefact": "load save",
    "backend": "Backend CallSignature Finished LateOperators RuleUse Target",
    "benchmarking": "Timings bench",
    "calibration": "calibrate",
    "capabilities": "Capabilities Support",
    "capability_row": "Capability",
    "collecting": "Statistics statistics",
    "compiling": "CompiledModel compile_lowered",
    "composing": "compose quantizer_from_dict quantizer_from_json quantizer_of",
    "composition": "ComposableQuantizer",
    "configs": "config_from_json config_to_json spec_from_json spec_to_json",
    "constraints": "TensorConstraint",
    "diagnosis.comparing": "compare",
    "diagnosis.comparison": "Compared Comparison",
    "diagnosis.sensitivity": "Sensitivity SiteCost sensitivity",
    "diagnosis.tuned": "Tuning",
    "diagnosis.tuning": "tune",
    "errors": (
        "AnnotationConflictError ArtefactError BackendNotFoundError CalibrationError CompilationError "
        "ConfigError ExcludedBackendError InputError InternalError MemberError MissingBackendError "
        "NotExportedError NothingQuantizedError NotLoweredError PluginError ProjectError QomposeError "
        "QomposeWarning RequirementError RequirementWarning SelectorError SharingError StageError "
        "StatisticsError TargetError TuningError UncalibratedError UserError"
    ),
    "exported_modes": (
        "allow_exported_model_train_eval move_exported_model_to_eval move_exported_model_to_train"
    ),
    "histogram_observers": (
        "EntropyObserver HistogramObserver PerChannelHistogramObserver PercentileObserver "
        "observer_for_range weight_observer_for_range"
    ),
    "fake_quantize": "FakeQuantize FixedQParamsFakeQuantize FusedMovingAvgObsFakeQuantize",
    "hookspecs": "API_VERSION hookimpl",
    "inquiry": "NodeSupport can_quantize",
    "learned": "LearnableFakeQuantize",
    "ledger": "Report Row",
    "observers": (
        "FixedQParamsObserver MinMaxObserver MovingAverageMinMaxObserver "
        "MovingAveragePerChannelMinMaxObserver PerBlockMinMaxObserver PerChannelMinMaxObserver "
        "PlaceholderObserver"
    ),
    "operators": "ORDER_PRESERVING SCALE_PRESERVING VALUE_PRESERVING",
    "patterns": "Match OperatorPattern Pattern",
    "pipeline": "convert_pt2e lower prepare_pt2e prepare_qat_pt2e",
    "plan": "Plan",
    "plugins": "BackendInfo backends load_backend",
    "quantizer": "Quantizer",
    "quantizing": "QuantizedModel quantize",
    "quantized_tensors": "DynamicTensor QuantizedTensor",
    "region": "Region on_integers",
    "repairs.words": "SmoothQuant",
    "reporting": "assert_lowered assert_quantized report",
    "roles": (
        "ObserverOrFakeQuantize OperatorConfig OperatorPatternType annotate_input_qspec_map "
        "annotate_output_qspec get_bias_qspec get_input_act_qspec get_module_name_filter "
        "get_output_act_qspec get_weight_qspec is_valid_annotation"
    ),
    "rule_quantizer": "RuleQuantizer",
    "rules": "Guard Kernel NotLowerable Rule",
    "scaffolding": "new_backend",
    "schedules": (
        "QATSchedule disable_fake_quant disable_observer enable_fake_quant enable_observer "
        "freeze_batch_norm unfreeze_batch_norm"
    ),
    "specs": (
        "DerivedQuantizationSpec EdgeOrNode FixedQParamsQuantizationSpec QuantizationAnnotation "
        "QuantizationConfig QuantizationSpec QuantizationSpecBase SharedQuantizationSpec"
    ),
    "training_specs": "training_config",
    "usual_specs": "activation_spec weight_spec",
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
