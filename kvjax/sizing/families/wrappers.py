"""Models that hold the decoder's config as a part of their own, such as vision-language models."""

from dataclasses import replace
from typing import Any

from kvjax.sizing.families.wrapper import Wrapper


def _own(family: str, **more: Any) -> Wrapper:
    """A class with one decoder, whatever the part calls itself."""
    return Wrapper(family, fixed=True, **more)


def _beside(family: str, **more: Any) -> Wrapper:
    """The same, with earlier checkpoints that have the decoder's fields beside the encoder's."""
    return _own(family, flat=True, **more)


_ENCODER_DECODER = Wrapper(
    "bert",
    path=("decoder",),
    given={"is_decoder": True, "add_cross_attention": True, "is_encoder_decoder": False},
)
_LLAMA, _QWEN2, _OPT = Wrapper("llama"), Wrapper("qwen2"), Wrapper("opt")
_LLM_CONFIG = Wrapper(path=("llm_config",), also=("text_config",))


def _sizes(width: int, depth: int, query_heads: int, kv_heads: int, **more: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_VISION = {
    "apertus1p5": _own("apertus1p5_text"),
    "aria": _own("aria_text"),
    "aya_vision": Wrapper("cohere2"),
    "blip": _own("blip_text_model"),
    "blip-2": _OPT,
    "cohere2_vision": Wrapper("cohere2"),
    "cohere_compass": _own("cohere_compass_text"),
    "cosmos3_edge": _own("cosmos3_edge_text"),
    "cosmos3_omni": Wrapper("qwen3_vl_text"),
    "deepseek_ocr2": _own("deepseek_ocr2_text"),
    "deepseek_vl": _LLAMA,
    "deepseek_vl_hybrid": _LLAMA,
    "diffusion_gemma": _own("diffusion_gemma_text"),
    "dots3_note": _beside("dots3_note_text"),
    "emu3": _own("emu3_text_model"),
    "ernie4_5_vl_moe": _own("ernie4_5_vl_moe_text"),
    "exaone4_5": Wrapper("exaone4", renamed={"exaone4_5_text": "exaone4"}),
    "fast_vlm": Wrapper("qwen2", default=_sizes(3584, 28, 28, 4)),
    "florence2": Wrapper("bart", renamed={"florence2_language": "bart"}),
    "fuyu": Wrapper(
        "persimmon",
        flat=True,
        default={"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 64},
    ),
    "gemma3": _own("gemma3_text"),
    "gemma3n": _own("gemma3n_text"),
    "gemma4": _own("gemma4_text"),
    "gemma4_assistant": _own("gemma4_assistant_text"),
    "gemma4_unified_assistant": _own("gemma4_assistant_text"),
    "gemma4_unified": _own("gemma4_unified_text"),
    "glm46v": Wrapper("glm4v_text"),
    "glm4v": _own("glm4v_text"),
    "glm4v_moe": _own("glm4v_moe_text"),
    "glm5_next": _beside("glm5_next_text"),
    "glm_image": _own("glm_image_text"),
    "glm_ocr": _own("glm_ocr_text"),
    "glmga": Wrapper("glm4v_text"),
    "got_ocr2": Wrapper("qwen2", default=_sizes(1024, 24, 16, 16)),
    "granite4_vision": _own("granite4_vision_text"),
    "granite_docling": _own("granite_docling_text"),
    "hunyuan_vl": _beside("hunyuan_vl_text"),
    "hy_v4_vl": _own("hy_v4_vl_text"),
    "hyperclovax_vision_v2": Wrapper("hyperclovax"),
    "idefics2": Wrapper("mistral"),
    "idefics3": _LLAMA,
    "inkling2": _own("inkling2_text"),
    "inkling2_loop": _own("inkling2_loop_text"),
    "inkling_mm_model": _own("inkling_text"),
    "instructblip": _OPT,
    "instructblipvideo": _OPT,
    "internvl": _QWEN2,
    "janus": _LLAMA,
    "jev": Wrapper("qwen3_5_text"),
    "kimi_k25": Wrapper("deepseek_v3", renamed={"kimi_k2": "deepseek_v3"}),
    "kosmos-2": _own("kosmos_2_text_model"),
    "kosmos-2.5": _own("kosmos_2_5_text_model"),
    "lfm2_vl": Wrapper("lfm2"),
    "lfm3_vl": Wrapper("lfm3"),
    "lighton_ocr": Wrapper("qwen3", default=_sizes(1024, 28, 16, 8, head_dim=128)),
    "llama4": _own("llama4_text"),
    "llava": replace(_LLAMA, flat=True),
    "llava_next": _LLAMA,
    "llava_next_video": _LLAMA,
    "llava_onevision": _QWEN2,
    "minicpm_ocr": Wrapper("qwen3_5_text"),
    "minicpmv4_6": Wrapper("qwen3_5_text"),
    "minicpmv4_7": Wrapper("qwen3_5_text"),
    "minimax_m3_vl": _own("minimax_m3_vl_text"),
    "mistral3": Wrapper(
        "mistral", default=_sizes(5120, 40, 32, 8, head_dim=128) | {"sliding_window": None}
    ),
    "mistral_large4": _own("mistral_large4_text"),
    "mllama": _own("mllama_text_model"),
    "molmo2": _own("molmo2_text"),
    "muse_glimmer": _own("muse_glimmer_text"),
    "muse_spark": _own("muse_spark_text"),
    "nemotron_h_omni": Wrapper("nemotron_h"),
    "ovis2": _QWEN2,
    "paddleocr_vl": _beside("paddleocr_vl_text"),
    "paligemma": Wrapper(
        "gemma",
        default=_sizes(2048, 18, 8, 1),
        given={"use_bidirectional_attention": False},  # of the prompt: no matter for the cache
    ),
    "perception_lm": _LLAMA,
    "pi0": Wrapper("paligemma", path=("vlm_config",)),
    "pix2struct": _own("pix2struct_text_model", given={"is_encoder_decoder": True}),
    "pp_chart2table": Wrapper("qwen2", default=_sizes(1024, 24, 16, 16)),
    "pp_formulanet": _own("pp_formulanet_text"),
    "qianfan_ocr": Wrapper("qwen3"),
    "qwen2_5_vl": _beside("qwen2_5_vl_text"),
    "qwen2_vl": _beside("qwen2_vl_text"),
    "qwen3_5": _own("qwen3_5_text"),
    "qwen3_5_moe": _own("qwen3_5_moe_text"),
    "qwen3_vl": _own("qwen3_vl_text"),
    "qwen3_vl_moe": _own("qwen3_vl_moe_text"),
    "qwen4_exp": _own("qwen4_exp_text"),
    "shieldgemma2": Wrapper("gemma3_text"),
    "smolvlm": _LLAMA,
    "step3p7": _own("step3p5"),
    "unlimited_ocr": _own("unlimited_ocr_text", also=("language_config",)),
    "video_llama_3": _QWEN2,
    "video_llava": _LLAMA,
    "vipllava": _LLAMA,
}

_SPEECH = {
    "audioflamingo3": _QWEN2,
    "canary": _own("canary_decoder", path=("decoder_config",)),
    "dia": _own("dia_decoder", path=("decoder_config",)),
    "fun_asr_nano": Wrapper("qwen3", default=_sizes(1024, 28, 16, 8)),
    "glmasr": Wrapper("llama", default=_sizes(2048, 28, 16, 4), filled=True),
    "granite_speech": Wrapper("granite"),
    "granite_speech_plus": Wrapper("granite"),
    "moss_transcribe_diarize": Wrapper("qwen3", default=_sizes(1024, 28, 16, 8)),
    "musicflamingo": _QWEN2,
    "musicgen": _own("musicgen_decoder", path=("decoder",)),
    "musicgen_melody": _own("musicgen_melody_decoder", path=("decoder",)),
    "nemo_speechlm": Wrapper(
        "nemotron_h",
        default={
            "hidden_size": 2688,
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
    ),
    "omniasr": Wrapper("llama", default=_sizes(4096, 12, 8, 8)),
    "qwen2_5_omni": _own("qwen2_5_omni_thinker", path=("thinker_config",)),
    "qwen2_5_omni_thinker": _own("qwen2_5_omni_text"),
    "qwen2_audio": _QWEN2,
    "qwen3_asr": Wrapper("qwen3", default=_sizes(2048, 28, 16, 8, head_dim=128)),
    "qwen3_omni_moe": _own("qwen3_omni_moe_thinker", path=("thinker_config",)),
    "qwen3_omni_moe_thinker": _own("qwen3_omni_moe_text"),
    "vibevoice": _QWEN2,
    "vibevoice_asr": _QWEN2,
    "voxtral": Wrapper(
        "llama",
        filled=True,
        default={
            "hidden_size": 3072,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "voxtral_realtime": Wrapper(
        "voxtral_realtime_text",
        filled=True,
        default=_sizes(3072, 26, 32, 8, head_dim=128) | {"sliding_window": 8192},
    ),
}

# Classes for any encoder and any decoder.
_PAIRS = {
    "encoder-decoder": _ENCODER_DECODER,
    "speech-encoder-decoder": _ENCODER_DECODER,
    "vision-encoder-decoder": _ENCODER_DECODER,
    "t5gemma": _own("t5_gemma_module", path=("decoder",)),
    "t5gemma2": _own("t5gemma2_decoder", path=("decoder",)),
}

# Checkpoints that come with code of their own.
_REMOTE = {
    "NVLM_D": _LLM_CONFIG,
    "deepseek_vl_v2": Wrapper("deepseek_v2", path=("language_config",)),
    "h2ovl_chat": _LLM_CONFIG,
    "internvl_chat": _LLM_CONFIG,
    "kimi_k3": _own("kimi_k3_text"),
    "kimi_vl": Wrapper("deepseek_v3"),
    "lfm2-vl": Wrapper("lfm2"),
    "llava_llama": Wrapper("llama", path=("llm_cfg",), flat=True),
    "llava_mistral": _beside("mistral"),
    "llava_qwen": _beside("qwen2"),
    "llava_qwen2": _beside("qwen2"),
    "maira2": _LLAMA,
    "minimax_vl_01": _own("minimax_text_01"),
    "multi_modality": Wrapper("llama", path=("language_config",)),  # DeepSeek-VL and Janus
    "ovis": _LLM_CONFIG,
    "ovis2_5": Wrapper("qwen3", path=("llm_config",)),
    "phi3_v": _beside("phi3"),
    "step3_vl": _own("step3_text"),
    "vlm": Wrapper(),  # HyperCLOVA X SEED Vision
}

WRAPPERS: dict[str, Wrapper] = {**_VISION, **_SPEECH, **_PAIRS, **_REMOTE}
