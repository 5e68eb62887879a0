# SPDX-License-Identifier: Apache-2.0
# The public names: read at run time by lazy_loader, and by type checkers.

from . import kit as kit
from .capabilities import Capabilities as Capabilities, Capability as Capability, Support as Support
from .discovery import (
    API_VERSION as API_VERSION,
    BackendInfo as BackendInfo,
    backends as backends,
    hookimpl as hookimpl,
    load_backend as load_backend,
)
from .interface import (
    Backend as Backend,
    CallArgument as CallArgument,
    CallInterface as CallInterface,
    CallSignature as CallSignature,
    CallSize as CallSize,
    Finished as Finished,
    LateOperators as LateOperators,
    RuleUse as RuleUse,
    Target as Target,
    arguments_of as arguments_of,
    claim_of as claim_of,
    clear_origin as clear_origin,
    draft_of as draft_of,
    graphs_in as graphs_in,
    native_code_wanted as native_code_wanted,
    nodes_in as nodes_in,
    operator_of as operator_of,
    stages as stages,
    stand_for as stand_for,
)
from .kernel import (
    ORDER_PRESERVING as ORDER_PRESERVING,
    SCALE_PRESERVING as SCALE_PRESERVING,
    VALUE_PRESERVING as VALUE_PRESERVING,
    DynamicTensor as DynamicTensor,
    Kernel as Kernel,
    NotLowerable as NotLowerable,
    QuantizedTensor as QuantizedTensor,
    Region as Region,
    on_integers as on_integers,
)
from .pattern import Match as Match, OperatorPattern as OperatorPattern, Pattern as Pattern
from .rule import Guard as Guard, Rule as Rule, TensorConstraint as TensorConstraint
