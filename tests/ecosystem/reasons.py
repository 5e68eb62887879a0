# SPDX-License-Identifier: Apache-2.0
"""Why a quantizer does nothing or fails on a model, and why the two engines' results differ."""

from __future__ import annotations

ANY = ""
"""In place of a model: all of them."""

NO_EMBEDDING = "it takes embeddings alone, and the model has none"
NO_CONVOLUTION = "it takes convolutions alone, and the model has none"
NO_MATMUL = "it takes aten.matmul alone; the encoder's is inside scaled_dot_product_attention"
NO_RMS_NORM = "it takes aten.rms_norm alone, which no model has"
VECTORS = "it takes products with one row, conv1d and GRU alone"
BY_DESIGN = "it has no patterns, by design"
GUARD = "there, the guard of .module() reads the model's input dequantized; here the guard is no part of it"
FLOAT_ZERO_POINTS = (
    "torchao rounds before it adds the zero point, a float here, and then cuts the fraction off"
)
INTEGERS = "it wants the token ids quantized: torchao tries to; here what is said of integers is not followed"
ONE_DIMENSION = (
    "torchao's observer by channel takes no tensor of one dimension, such as a bias; here it may"
)

REASONS = {
    ("Embedding", "cnn"): NO_EMBEDDING, ("Embedding", "encoder"): NO_EMBEDDING,
    ("Embedding", "mlp"): FLOAT_ZERO_POINTS, ("Cadence A16Conv", "mlp"): NO_CONVOLUTION,
    ("Cadence A16Conv", "encoder"): NO_CONVOLUTION, ("Cadence A16Matmul", ANY): NO_MATMUL,
    ("Cadence W8A32", ANY): VECTORS, ("Cadence RmsNormNop", ANY): NO_RMS_NORM,
    ("Cadence Nop", ANY): BY_DESIGN, ("OpenVINO INT8_SYM", "encoder"): ONE_DIMENSION,
    ("OpenVINO INT8_MIXED", "encoder"): ONE_DIMENSION, ("Samsung", ANY): GUARD, ("MediaTek", ANY): GUARD,
    ("NXP", "mlp"): INTEGERS,
}  # fmt: skip


def reason_for(name: str, kind: str) -> str:
    """The reason for the cell of a quantizer and a model, "" where none is known."""
    return REASONS.get((name, kind)) or REASONS.get((name, ANY), "")
