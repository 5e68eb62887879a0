# SPDX-License-Identifier: Apache-2.0
# The public names: read at run time by lazy_loader, and by type checkers.

from .arithmetic import (
    choose_qparams as choose_qparams,
    choose_qparams_per_row as choose_qparams_per_row,
    quantize as quantize,
    quantize_rows as quantize_rows,
    requantize as requantize,
)
from .configs import (
    INT4 as INT4,
    ConfigFactory as ConfigFactory,
    ConfigOptions as ConfigOptions,
    accepts as accepts,
    check_booleans as check_booleans,
    check_integers as check_integers,
    named as named,
)
from .guards import (
    MAX_DEPTH as MAX_DEPTH,
    computed_factors as computed_factors,
    depth as depth,
    first_of as first_of,
    float32 as float32,
    float_types as float_types,
    keeps_half as keeps_half,
    not_training as not_training,
    one_group as one_group,
    over_dimensions as over_dimensions,
    plain_sum as plain_sum,
    rank as rank,
    separate_inputs as separate_inputs,
    several_groups as several_groups,
    shape_of as shape_of,
    sizes as sizes,
    spatial_zero_padding as spatial_zero_padding,
    without_alpha as without_alpha,
)
from .kernels import (
    CLAMP_ON_INTEGERS as CLAMP_ON_INTEGERS,
    UNMOVED as UNMOVED,
    ClampOnIntegers as ClampOnIntegers,
    Geometry as Geometry,
    channel_scales as channel_scales,
    float_bounds as float_bounds,
    geometry_of as geometry_of,
    integer_bounds as integer_bounds,
    kept as kept,
    nearest_integer as nearest_integer,
    padded as padded,
    unmoved as unmoved,
    window as window,
    with_pad as with_pad,
)
from .operators import register_operator as register_operator
from .patterns import (
    ADD as ADD,
    ADD_FLOAT as ADD_FLOAT,
    BINARY as BINARY,
    CLAMP as CLAMP,
    DROPOUT as DROPOUT,
    ELU as ELU,
    GELU as GELU,
    HARDSIGMOID as HARDSIGMOID,
    HARDSWISH as HARDSWISH,
    HARDTANH as HARDTANH,
    IMAGE as IMAGE,
    LEAKY_RELU as LEAKY_RELU,
    PAD as PAD,
    PRODUCTS as PRODUCTS,
    RELU as RELU,
    RELU6 as RELU6,
    SEQUENCE as SEQUENCE,
    SIGMOID as SIGMOID,
    SILU as SILU,
    TANH as TANH,
    Form as Form,
    Product as Product,
    Step as Step,
    any_of as any_of,
    binary as binary,
    fused as fused,
    one as one,
)
from .reference import (
    INTEGER_REFERENCE as INTEGER_REFERENCE,
    reference as reference,
    reference_kernel as reference_kernel,
)
from .rules import (
    MOVES as MOVES,
    Move as Move,
    binary_rule as binary_rule,
    move_rules as move_rules,
    product_rule as product_rule,
    unary_rule as unary_rule,
)
from .weight_cache import WeightCache as WeightCache
