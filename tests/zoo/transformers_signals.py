# SPDX-License-Identifier: Apache-2.0
"""Architectures of the `transformers` package for images and sound, small, random weights."""

from __future__ import annotations

from torch import Tensor, nn

from .entry import Draw, ZooModel, floats, zoo_model
from .transformers_family import HEADS, LAYERS, WIDTH, make

SIZE = 32

_VIT: dict[str, object] = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 32, "image_size": SIZE, "patch_size": 8,
}  # fmt: skip
_SWIN: dict[str, object] = {
    "image_size": SIZE, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2],
    "window_size": 4,
}  # fmt: skip
_STAGES: dict[str, object] = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "strides": [4, 2],
}  # fmt: skip


class SignalModel(nn.Module):
    """A model of pixels or samples, and perhaps of noise that it draws else; its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, signal: Tensor, noise: Tensor | None = None) -> Tensor:
        options = {} if noise is None else {"noise": noise}
        return self.model(signal, return_dict=False, **options)[0]


def _signal(name: str, kind: str, *tags: str, draw: Draw, **config: object) -> ZooModel:
    return zoo_model(
        name, lambda: SignalModel(make(kind, config)), draw, tags={"transformers", *tags}
    )


def _image(name: str, kind: str, *tags: str, size: int = SIZE, **config: object) -> ZooModel:
    return _signal(name, kind, "conv", *tags, draw=floats(2, 3, size, size), **config)


def whisper_encoder() -> nn.Module:
    """The encoder alone: convolutions over mel bands, then attention."""
    config = {
        "num_mel_bins": 8, "max_source_positions": 16, "d_model": WIDTH, "encoder_layers": LAYERS,
        "encoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_layers": 1,
        "decoder_attention_heads": HEADS, "decoder_ffn_dim": 32, "vocab_size": 64,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0,
    }  # fmt: skip
    return SignalModel(make("WhisperModel", config).encoder)


MODELS: tuple[ZooModel, ...] = (
    _image("vit", "ViTModel", "attention", **{**_VIT, "image_size": 16, "patch_size": 4}, size=16),
    _image("deit", "DeiTModel", "attention", **_VIT),
    _image("beit", "BeitModel", "attention", **_VIT, use_relative_position_bias=True),
    _image("dinov2", "Dinov2Model", "attention", **_VIT),
    zoo_model("vit_mae", lambda: SignalModel(make("ViTMAEModel", _VIT)),
              floats(2, 3, SIZE, SIZE), floats(2, 16), tags={"transformers", "conv", "attention"}),
    _image("clip_vision", "CLIPVisionModel", "attention", **_VIT),
    _image("siglip_vision", "SiglipVisionModel", "attention", **_VIT),
    _image("swin", "SwinModel", "attention", "matmul", **_SWIN),
    _image("swin_v2", "Swinv2Model", "attention", "matmul", **_SWIN),
    _image("pvt", "PvtModel", "attention", "matmul", **_STAGES, image_size=SIZE,
           sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], num_attention_heads=[1, 2],
           mlp_ratios=[2, 2]),
    _image("segformer", "SegformerForSemanticSegmentation", "attention", "bn", "depthwise",
           **_STAGES, sr_ratios=[2, 1], patch_sizes=[7, 3], num_attention_heads=[1, 2],
           mlp_ratios=[2, 2], decoder_hidden_size=WIDTH, num_labels=4),
    _image("poolformer", "PoolFormerModel", "residual", **_STAGES, patch_sizes=[7, 3],
           padding=[2, 1]),
    _image("mobilevit", "MobileViTModel", "attention", "bn", "depthwise", "cat", image_size=SIZE,
           patch_size=2, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16],
           num_attention_heads=2),
    _image("yolos", "YolosForObjectDetection", "attention", "cat",
           **{**_VIT, "image_size": [SIZE, SIZE]}, num_detection_tokens=4),
    _image("convnext_v2", "ConvNextV2Model", "depthwise",
           hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=SIZE),
    _image("resnet", "ResNetForImageClassification", "bn", "residual", embedding_size=8,
           hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck", num_labels=4),
    _image("regnet", "RegNetModel", "bn", "residual", embedding_size=8, hidden_sizes=[8, 16],
           depths=[1, 1], groups_width=4),
    _image("mobilenet_v2_padded", "MobileNetV2Model", "bn", "residual", "depthwise",
           image_size=SIZE, depth_multiplier=0.25, min_depth=4, depth_divisible_by=4),
    _image("efficientnet", "EfficientNetModel", "bn", "residual", "depthwise", image_size=SIZE,
           in_channels=[32, 16, 32], out_channels=[16, 32, 32], kernel_sizes=[3, 3, 5],
           strides=[1, 2, 1], num_block_repeats=[1, 1, 2], expand_ratios=[1, 4, 4],
           depthwise_padding=[], hidden_dim=320, width_coefficient=0.25, depth_coefficient=1.0,
           depth_divisor=4),
    _signal("wav2vec2", "Wav2Vec2Model", "conv", "attention", draw=floats(2, 400),
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=32, conv_dim=[8, 8], conv_kernel=[4, 4], conv_stride=[4, 4],
            num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2),
    zoo_model("whisper_encoder", whisper_encoder, floats(2, 8, SIZE),
              tags={"transformers", "conv", "attention"}),
    _signal("perceiver", "PerceiverModel", "attention", "matmul", draw=floats(2, 6, 12),
            num_latents=4, d_latents=WIDTH, d_model=12, num_blocks=1,
            num_self_attends_per_block=LAYERS, num_self_attention_heads=HEADS,
            num_cross_attention_heads=HEADS, qk_channels=WIDTH, v_channels=WIDTH),
)  # fmt: skip
