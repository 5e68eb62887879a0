# SPDX-License-Identifier: Apache-2.0
# The public names: read at run time by lazy_loader, and by type checkers.

from . import (
    algorithms as algorithms,
    backend as backend,
    diagnosis as diagnosis,
    errors as errors,
    lowering as lowering,
    observers as observers,
    plan as plan,
    quantizer as quantizer,
    reporting as reporting,
    spec as spec,
    training as training,
)
from .backend.capabilities import Capabilities as Capabilities
from .backend.discovery import backends as backends
from .calibration.calibrator import calibrate as calibrate
from .calibration.statistics_data import Statistics as Statistics, statistics as statistics
from .conversion.convert import convert_pt2e as convert_pt2e
from .diagnosis.operator_sensitivity import sensitivity as sensitivity
from .diagnosis.support_query import can_quantize as can_quantize
from .diagnosis.tuning_search import tune as tune
from .diagnosis.value_comparison import compare as compare
from .errors import (
    QomposeError as QomposeError,
    QomposeWarning as QomposeWarning,
    UserError as UserError,
)
from .lowering.compilation import compile_lowered as compile_lowered
from .lowering.lower_regions import lower as lower
from .observers.config import (
    activation_spec as activation_spec,
    training_config as training_config,
    weight_spec as weight_spec,
)
from .preparation.prepare import prepare_pt2e as prepare_pt2e, prepare_qat_pt2e as prepare_qat_pt2e
from .quantized_model import (
    QuantizedModel as QuantizedModel,
    quantize as quantize,
    quantize_checkpoint as quantize_checkpoint,
)
from .quantizer.base import Quantizer as Quantizer
from .quantizer.composition import (
    ComposableQuantizer as ComposableQuantizer,
    compose as compose,
    quantizer_of as quantizer_of,
)
from .quantizer.restriction import restrict as restrict
from .quantizer.rule_quantizer import RuleQuantizer as RuleQuantizer
from .reporting.build_report import (
    assert_lowered as assert_lowered,
    assert_quantized as assert_quantized,
    report as report,
)
from .reporting.report_data import Report as Report
from .spec.algorithm_choice import SmoothQuant as SmoothQuant
from .spec.quantization_spec import (
    QuantizationConfig as QuantizationConfig,
    QuantizationSpec as QuantizationSpec,
)
from .storage.artifact import load as load, save as save
from .storage.pt2_archive import export_pt2 as export_pt2

_submodules: set[str]  # those above that are modules
