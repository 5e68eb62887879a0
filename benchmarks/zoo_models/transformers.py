# SPDX-License-Identifier: Apache-2.0
"""More architectures of the `transformers` package."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.entry import ZooModel, floats, ids, keep_mask, zoo_model
from tests.zoo.transformers_family import HEADS, LAYERS, WIDTH, WORDS, TextModel, make
from tests.zoo.transformers_signals import SIZE, SignalModel

LENGTH = 8

_TEXT: dict[str, object] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "intermediate_size": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED: dict[str, object] = {**_TEXT, "num_key_value_heads": 1}
_VIT: dict[str, object] = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 32, "image_size": SIZE, "patch_size": 8,
}  # fmt: skip
_PAIR: dict[str, object] = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_UNBOUND = {key: value for key, value in _PAIR.items() if key != "max_position_embeddings"}
_T5: dict[str, object] = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1,
    "num_heads": HEADS, "relative_attention_num_buckets": 8, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SOUND: dict[str, object] = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 32, "conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [4, 4],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


class Named(nn.Module):
    """A model whose inputs have names; its first output."""

    def __init__(self, model: nn.Module, *names: str, **options: object) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        return self.model(**given, return_dict=False, **self.options)[0]


def _text(name: str, kind: str, **config: object) -> ZooModel:
    words, keep = ids(WORDS, 2, LENGTH), keep_mask(2, LENGTH, dtype=torch.int64)
    return zoo_model(name, lambda: TextModel(make(kind, config)), words, keep, tags=_TAGS)


def _image(name: str, kind: str, size: int = SIZE, **config: object) -> ZooModel:
    draw = floats(2, 3, size, size)
    return zoo_model(name, lambda: SignalModel(make(kind, config)), draw, tags=_TAGS)


def _named(name: str, kind: str, inputs: dict[str, object], **config: object) -> ZooModel:
    draws = inputs.values()
    return zoo_model(name, lambda: Named(make(kind, config), *inputs), *draws, tags=_TAGS)  # type: ignore[arg-type]


_TAGS = {"further", "transformers"}
_TRANSLATION: dict[str, object] = {
    "input_ids": ids(WORDS, 2, LENGTH),
    "decoder_input_ids": ids(WORDS, 2, 5),
}

MODELS: tuple[ZooModel, ...] = (
    _text("bert_masked", "BertForMaskedLM", **_TEXT),
    _text("roberta_tokens", "RobertaForTokenClassification", **{**_TEXT, "max_position_embeddings": 40}),
    _text("xlm_roberta", "XLMRobertaModel", **{**_TEXT, "max_position_embeddings": 40}),
    _text("camembert", "CamembertModel", **{**_TEXT, "max_position_embeddings": 40}),
    _text("ernie", "ErnieModel", **_TEXT),
    _text("rembert", "RemBertModel", **_TEXT, input_embedding_size=8, output_embedding_size=8),
    _text("deberta_v1", "DebertaModel", **_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _text("megatron_bert", "MegatronBertModel", **_TEXT),
    _text("funnel", "FunnelModel", vocab_size=WORDS, d_model=WIDTH, n_head=HEADS, d_head=8, d_inner=32,
          block_sizes=[1, 1], num_decoder_layers=1),
    _text("big_bird", "BigBirdModel", **_TEXT, attention_type="original_full"),
    _text("ibert", "IBertModel", **{**_TEXT, "max_position_embeddings": 40}),
    _text("flaubert", "FlaubertModel", vocab_size=WORDS, emb_dim=WIDTH, n_layers=LAYERS, n_heads=HEADS,
          max_position_embeddings=32, pad_index=0),
    _text("openai_gpt", "OpenAIGPTModel", vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
          n_positions=32),
    _text("gpt_neo", "GPTNeoForCausalLM", vocab_size=WORDS, hidden_size=WIDTH, num_layers=LAYERS,
          num_heads=HEADS, max_position_embeddings=32, attention_types=[[["global", "local"], 1]],
          window_size=4, bos_token_id=1, eos_token_id=2),
    _text("gptj", "GPTJForCausalLM", vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
          n_positions=32, rotary_dim=4, bos_token_id=1, eos_token_id=2),
    _text("gpt_bigcode", "GPTBigCodeForCausalLM", vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS,
          n_head=HEADS, n_positions=32, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    _text("codegen", "CodeGenForCausalLM", vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=4,
          n_positions=32, rotary_dim=4, bos_token_id=1, eos_token_id=2),
    _text("gpt_oss", "GptOssForCausalLM", **_GROUPED, head_dim=8, num_local_experts=4,
          num_experts_per_tok=2, sliding_window=4),
    _text("qwen2_moe", "Qwen2MoeForCausalLM", **_GROUPED, num_experts=4, num_experts_per_tok=2,
          moe_intermediate_size=16, shared_expert_intermediate_size=16),
    _text("qwen3_moe", "Qwen3MoeForCausalLM", **_GROUPED, head_dim=8, num_experts=4,
          num_experts_per_tok=2, moe_intermediate_size=16),
    _text("olmo2", "Olmo2ForCausalLM", **_GROUPED), _text("olmo", "OlmoForCausalLM", **_GROUPED),
    _text("stablelm", "StableLmForCausalLM", **_GROUPED),
    _text("starcoder2", "Starcoder2ForCausalLM", **_GROUPED),
    _text("cohere", "CohereForCausalLM", **_GROUPED), _text("granite", "GraniteForCausalLM", **_GROUPED),
    _text("glm", "GlmForCausalLM", **_GROUPED, head_dim=8),
    _text("nemotron", "NemotronForCausalLM", **_GROUPED), _text("persimmon", "PersimmonForCausalLM", **_TEXT),
    _text("smollm3", "SmolLM3ForCausalLM", **_GROUPED),
    _text("gemma3", "Gemma3ForCausalLM", **_GROUPED, head_dim=8, sliding_window=4),
    _text("deepseek_v3", "DeepseekV3ForCausalLM", **_TEXT, num_key_value_heads=2, q_lora_rank=8,
          kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, n_routed_experts=4,
          num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, moe_intermediate_size=16,
          first_k_dense_replace=1),
    _text("mamba", "MambaForCausalLM", vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1,
          state_size=4, pad_token_id=0),
    _text("biogpt", "BioGptForCausalLM", **_TEXT), _text("xglm", "XGLMForCausalLM", vocab_size=WORDS,
          d_model=WIDTH, ffn_dim=32, num_layers=LAYERS, attention_heads=HEADS, max_position_embeddings=32),
    _named("t5_gated", "T5ForConditionalGeneration", _TRANSLATION, **_T5, feed_forward_proj="gated-gelu"),
    _named("mt5", "MT5ForConditionalGeneration", _TRANSLATION, **_T5),
    _named("pegasus", "PegasusModel", _TRANSLATION, **_PAIR),
    _named("marian", "MarianMTModel", _TRANSLATION, **_PAIR),
    _named("m2m_100", "M2M100Model", _TRANSLATION, **_PAIR),
    _named("blenderbot", "BlenderbotModel", _TRANSLATION, **_PAIR),
    _named("whisper", "WhisperForConditionalGeneration",
           {"input_features": floats(2, 8, SIZE), "decoder_input_ids": ids(WORDS, 2, 5)},
           **_UNBOUND, num_mel_bins=8,
           max_source_positions=16, max_target_positions=16),
    _named("speech_to_text", "Speech2TextModel",
           {"input_features": floats(2, 24, 8), "decoder_input_ids": ids(WORDS, 2, 5)},
           **_UNBOUND, input_feat_per_channel=8,
           conv_channels=16, max_source_positions=32, max_target_positions=16),
    _named("clip", "CLIPModel",
           {"input_ids": ids(WORDS, 2, LENGTH), "pixel_values": floats(2, 3, SIZE, SIZE)},
           text_config=dict(_TEXT), vision_config=dict(_VIT), projection_dim=8),
    _named("siglip", "SiglipModel",
           {"input_ids": ids(WORDS, 2, LENGTH), "pixel_values": floats(2, 3, SIZE, SIZE)},
           text_config=dict(_TEXT, projection_size=WIDTH), vision_config=dict(_VIT)),
    _named("blip_text", "BlipTextModel", {"input_ids": ids(WORDS, 2, LENGTH)}, **_TEXT,
           encoder_hidden_size=WIDTH),
    _named("layoutlm", "LayoutLMModel", {"input_ids": ids(WORDS, 2, LENGTH)}, **_TEXT),
    _named("patchtst", "PatchTSTModel", {"past_values": floats(2, 24, 3)}, num_input_channels=3,
           context_length=24, patch_length=8, patch_stride=4, d_model=WIDTH, num_hidden_layers=1,
           num_attention_heads=HEADS, ffn_dim=32),
    _named("patchtsmixer", "PatchTSMixerModel", {"past_values": floats(2, 24, 3)}, num_input_channels=3,
           context_length=24, patch_length=8, patch_stride=8, d_model=WIDTH, num_layers=1),
    _named("decision", "DecisionTransformerModel",
           {"states": floats(2, 4, 5), "actions": floats(2, 4, 3), "rewards": floats(2, 4, 1),
            "returns_to_go": floats(2, 4, 1), "timesteps": ids(16, 2, 4),
            "attention_mask": keep_mask(2, 4, dtype=torch.int64)},
           state_dim=5, act_dim=3, hidden_size=WIDTH, max_ep_len=16, n_layer=1, n_head=HEADS),
    _image("convnext_v1", "ConvNextModel", hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=SIZE),
    _image("mobilenet_v1", "MobileNetV1Model", image_size=SIZE, depth_multiplier=0.25),
    _image("bit", "BitModel", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=2),
    _image("levit", "LevitModel", image_size=SIZE, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2],
           depths=[1, 1, 1], key_dim=[8, 8, 8], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2]),
    _image("pvt_v2", "PvtV2Model", image_size=SIZE, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
           num_attention_heads=[1, 2, 2, 2], sr_ratios=[8, 4, 2, 1], mlp_ratios=[2, 2, 2, 2]),
    _image("focalnet", "FocalNetModel", image_size=SIZE, embed_dim=8, depths=[1, 1], hidden_sizes=[8, 16],
           focal_levels=[2, 2], focal_windows=[3, 3]),
    _image("efficientformer_swift", "SwiftFormerModel", image_size=SIZE, depths=[1, 1, 1, 1],
           embed_dims=[8, 8, 16, 16]),
    _image("hiera", "HieraModel", image_size=[64, 64], embed_dim=8, depths=[1, 1], num_heads=[1, 2],
           num_query_pool=1, size=64),
    _image("vit_msn", "ViTMSNModel", **_VIT), _image("dinov2_registers", "Dinov2WithRegistersModel", **_VIT),
    _image("ijepa", "IJepaModel", **_VIT), _image("data2vec_vision", "Data2VecVisionModel", **_VIT),
    _image("swin2sr", "Swin2SRForImageSuperResolution", image_size=16, size=16, embed_dim=8, depths=[1],
           num_heads=[2], window_size=4, upscale=2),
    _image("textnet", "TextNetModel", image_size=[SIZE, SIZE]),
    zoo_model("timesformer", lambda: SignalModel(make("TimesformerModel", {**_VIT, "num_frames": 2})),
              floats(2, 2, 3, SIZE, SIZE), tags=_TAGS),
    zoo_model("video_mae_vivit", lambda: SignalModel(make("VivitModel", {**_VIT, "num_frames": 2,
              "tubelet_size": [2, 8, 8]})), floats(2, 2, 3, SIZE, SIZE), tags=_TAGS),
    zoo_model("hubert", lambda: SignalModel(make("HubertModel", _SOUND)), floats(2, 400), tags=_TAGS),
    zoo_model("wavlm", lambda: SignalModel(make("WavLMModel", _SOUND)), floats(2, 400), tags=_TAGS),
    zoo_model("unispeech", lambda: SignalModel(make("UniSpeechModel", _SOUND)), floats(2, 400), tags=_TAGS),
    zoo_model("sew", lambda: SignalModel(make("SEWModel", {**_SOUND, "squeeze_factor": 2})),
              floats(2, 400), tags=_TAGS),
    zoo_model("wav2vec2_conformer", lambda: SignalModel(make("Wav2Vec2ConformerModel", _SOUND)),
              floats(2, 400), tags=_TAGS),
    zoo_model("data2vec_audio", lambda: SignalModel(make("Data2VecAudioModel", _SOUND)), floats(2, 400),
              tags=_TAGS),
    zoo_model("audio_spectrogram", lambda: SignalModel(make("ASTModel", {**_VIT, "num_mel_bins": 16,
              "max_length": 24})), floats(2, 24, 16), tags=_TAGS),
)  # fmt: skip
