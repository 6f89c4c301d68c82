"""Models that hold their decoder's config as a part, by published facts and by hand."""

import pytest

from kvjax.sizing import load
from kvjax.sizing.families import READERS, WRAPPERS

VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PER_TOKEN = 3 * 2 * 2 * 16 * 2  # of TEXT in bf16
LLAVA_15 = {
    "model_type": "llava",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
    },
    "vision_config": VISION,
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_window_layers": 28,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vision_config": {"model_type": "qwen2_vl", "depth": 32, "num_heads": 16},
}


def per_token(config: dict) -> float:
    return load(config).bytes_per_token()


# --- where the part lies


def test_llava_15_leaves_out_what_equals_llamas_defaults():
    assert per_token(LLAVA_15) == 32 * 2 * 4096 * 2 == 524_288


@pytest.mark.parametrize(
    "text",
    [LLAVA_15["text_config"], {"model_type": "llama"}, {}, None],
    ids=["published", "named", "empty", "null"],
)
def test_vision_heads_are_never_picked_up(text):
    spec = load({**LLAVA_15, "text_config": text})
    assert len(spec.layers) == 32
    assert {(layer.query_heads, layer.key_dim) for layer in spec.layers} == {(32, 128)}
    assert load({"model_type": "llava", "text_config": text}).layers == spec.layers


def test_qwen3_vl_32b():
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": VISION}
    assert per_token(config) == 262_144


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llava", {"text_config": {"model_type": "llama", **TEXT}}),
        ("llava_onevision", {"text_config": {"model_type": "qwen2", **TEXT}}),
        ("internvl", {"text_config": TEXT}),
        ("internvl_chat", {"llm_config": {"model_type": "qwen2", **TEXT}}),
        ("ovis", {"llm_config": {"model_type": "llama", **TEXT}}),
        ("llava_llama", {"llm_cfg": {"model_type": "llama", **TEXT}}),
        ("vlm", {"text_config": {"model_type": "llama", **TEXT}}),
        ("qwen2_audio", {"text_config": TEXT, "audio_config": VISION}),
        ("granite_speech", {"text_config": TEXT, "encoder_config": VISION, "window_size": 15}),
        ("qwen2_5_omni", {"thinker_config": {"text_config": TEXT, "audio_config": VISION}}),
        ("qwen2_5_omni_thinker", {"text_config": TEXT, "vision_config": VISION}),
        ("pi0", {"vlm_config": {"text_config": {**TEXT, "head_dim": 16}}, "dit_config": VISION}),
    ],
)
def test_the_part(model_type, fields):
    spec = load({"model_type": model_type, **fields})
    assert spec.model_type == model_type
    assert spec.bytes_per_token() == PER_TOKEN


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen2_vl", {}),
        ("qwen2_5_vl", {}),
        ("hunyuan_vl", {"head_dim": 16}),
        ("paddleocr_vl", {"head_dim": 16}),
        ("llava", {}),
        ("llava_llama", {"mm_vision_tower": "openai/clip-vit-large-patch14-336"}),
        ("molmo", {}),
        ("minicpmv", {"sliding_window": 131072, "use_sliding_window": False}),
        ("phi3_v", {"img_processor": {"name": "clip_vision_model"}}),
    ],
)
def test_fields_beside_the_vision_part(model_type, fields):
    """As in checkpoints of earlier releases, and of code that comes with them."""
    spec = load({"model_type": model_type, "vision_config": VISION, **TEXT, **fields})
    assert spec.bytes_per_token() == PER_TOKEN


def test_molmo_in_olmos_spelling():
    config = {"model_type": "molmo", "d_model": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2}
    assert per_token(config) == PER_TOKEN
    assert per_token({**config, "n_kv_heads": None}) == 2 * PER_TOKEN


def test_qwen2_vl_7b_flat_and_nested():
    flat = load(QWEN2_VL)
    assert flat.bytes_per_token() == 28 * 2 * 4 * 128 * 2 == 57_344
    vision = QWEN2_VL["vision_config"]
    text = {name: value for name, value in QWEN2_VL.items() if name != "vision_config"}
    nested = {"model_type": "qwen2_vl", "text_config": text, "vision_config": vision}
    assert load(nested).layers == flat.layers
    # The part counts where both are there.
    both = {**QWEN2_VL, "num_hidden_layers": 99, "text_config": text}
    assert load(both).layers == flat.layers


def test_a_flat_config_must_state_its_sizes():
    config = {name: value for name, value in QWEN2_VL.items() if name != "hidden_size"}
    with pytest.raises(ValueError, match="hidden_size: absent"):
        load(config)


# --- whose family the part is


def test_a_class_with_one_decoder_ignores_what_the_part_calls_itself():
    text = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 2}
    layers = load({"model_type": "qwen3_vl", "text_config": text}).layers
    assert {layer.key_dim for layer in layers} == {128}
    layers = load({"model_type": "internvl", "text_config": text}).layers
    assert {layer.key_dim for layer in layers} == {64}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("florence2", "florence2_language"), ("kimi_k25", "kimi_k2")],
)
def test_names_of_published_parts(model_type, name):
    named, unnamed = ({"model_type": name}, {})
    assert (
        load({"model_type": model_type, "text_config": named}).layers
        == load({"model_type": model_type, "text_config": unnamed}).layers
    )


def test_blip_2_decodes_with_opt_or_t5():
    t5 = {"model_type": "t5", "d_model": 2048, "d_kv": 64, "num_layers": 24, "num_heads": 32}
    layers = load({"model_type": "blip-2", "text_config": t5}).layers
    assert [layer.cross for layer in layers] == [False, True] * 24
    opt = {**TEXT, "model_type": "opt", "word_embed_proj_dim": 64}
    del opt["num_key_value_heads"]
    layers = load({"model_type": "blip-2", "text_config": opt}).layers
    assert [(layer.cross, layer.kv_heads) for layer in layers] == [(False, 4)] * 3


# --- what the class takes where the part says nothing


@pytest.mark.parametrize(
    ("model_type", "depth", "kv_heads", "head_dim"),
    [
        ("got_ocr2", 24, 16, 64),
        ("glmasr", 28, 4, 128),
        ("mistral3", 40, 8, 128),
        ("omniasr", 12, 8, 512),
        ("paligemma", 18, 1, 256),
        ("voxtral", 30, 8, 128),
    ],
)
def test_decoders_that_a_class_builds_by_itself(model_type, depth, kv_heads, head_dim):
    layers = load({"model_type": model_type}).layers
    assert len(layers) == depth
    assert {(layer.kv_heads, layer.key_dim) for layer in layers} == {(kv_heads, head_dim)}


def test_gaps_of_a_part_are_filled_by_its_family_or_by_the_model():
    """Mistral3's own numbers stand for a missing part alone, Voxtral's for missing fields too."""
    mistral = load({"model_type": "mistral3", "text_config": {"num_hidden_layers": 2}})
    assert (len(mistral.layers), mistral.d_model) == (2, 4096)
    voxtral = load({"model_type": "voxtral", "text_config": {"num_hidden_layers": 2}})
    assert (len(voxtral.layers), voxtral.d_model, voxtral.layers[0].kv_heads) == (2, 3072, 8)


def test_idefics2_leaves_out_what_equals_mistrals_defaults():
    config = {"model_type": "idefics2", "text_config": {"model_type": "mistral"}}
    spec = load(config)
    assert spec.bytes_per_token() == 32 * 2 * 8 * 128 * 2
    assert spec.layers[0].window == 4096


# --- decoders of other models' encoders


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "add_cross_attention": True,
    "is_decoder": True,
}


@pytest.mark.parametrize(
    ("decoder", "depth", "heads"),
    [
        (GPT2, 12, 12),
        (
            {
                "model_type": "mbart",
                "d_model": 1024,
                "encoder_layers": 12,
                "decoder_layers": 4,
                "decoder_attention_heads": 16,
                "is_encoder_decoder": False,
                "add_cross_attention": True,
            },
            4,
            16,
        ),
        (
            {
                "model_type": "trocr",
                "d_model": 1024,
                "decoder_layers": 12,
                "decoder_attention_heads": 16,
                "cross_attention_hidden_size": 768,
                "add_cross_attention": True,
            },
            12,
            16,
        ),
    ],
    ids=["vit-gpt2", "donut", "trocr"],
)
def test_vision_encoder_decoders(decoder, depth, heads):
    config = {"model_type": "vision-encoder-decoder", "encoder": VISION, "decoder": decoder}
    layers = load(config).layers
    assert [layer.cross for layer in layers] == [False, True] * depth
    assert {(layer.kv_heads, layer.key_dim) for layer in layers} == {(heads, 64)}


def test_musicgen_attends_to_its_text_and_the_melody_model_does_not():
    decoder = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    attends = load({"model_type": "musicgen", "decoder": decoder}).layers
    assert [layer.cross for layer in attends] == [False, True] * 3
    alone = load({"model_type": "musicgen_melody", "decoder": decoder}).layers
    assert [layer.cross for layer in alone] == [False] * 3


def test_mllama_layers_that_attend_to_the_image_keep_nothing_else():
    text = {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1]}
    layers = load({"model_type": "mllama", "text_config": text, "vision_config": VISION}).layers
    assert [layer.cross for layer in layers] == [False, True, False]


def test_images_of_idefics_are_kept_by_us_and_made_anew_by_transformers():
    config = {
        "model_type": "idefics",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "cross_layer_interval": 2,
        "vision_config": VISION,
    }
    spec, image = load(config), 10 * 2 * 64 * 2
    assert [layer.cross for layer in spec.layers] == [True, False, False] * 2
    assert spec.cache_bytes(0, source_tokens=10).allocated == 2 * image
    assert spec.cache_bytes(0, source_tokens=10, definition="hf-dynamic").allocated == 0


# --- what transformers 5.24 keeps of tiny random models: 2 rows of 12 tokens in f32, 17 of a source


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (
            {
                "model_type": "dia",
                "decoder_config": {
                    **TEXT,
                    "head_dim": 24,
                    "cross_num_attention_heads": 4,
                    "cross_num_key_value_heads": 4,
                    "cross_head_dim": 16,
                },
            },
            79_872,
        ),
        (
            {
                "model_type": "musicgen",
                "decoder": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
            },
            89_088,
        ),
        (
            {
                "model_type": "blip",
                "text_config": {
                    "hidden_size": 64,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                },
            },
            89_088,
        ),
        (
            {
                "model_type": "encoder-decoder",
                "decoder": {
                    "model_type": "bert",
                    "hidden_size": 64,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                },
            },
            89_088,
        ),
        ({"model_type": "kyutai_speech_to_text", "sliding_window": 8, **TEXT}, 10_752),
        (
            {
                "model_type": "diffusion_gemma",
                "text_config": {
                    **TEXT,
                    "num_hidden_layers": 7,
                    "head_dim": 24,
                    "global_head_dim": 32,
                    "num_global_key_value_heads": 1,
                    "sliding_window": 8,
                },
            },
            39_168,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_measured(config, kept):
    spec = load(config)
    found = spec.cache_bytes(12, 2, "f32", source_tokens=17, definition="hf-dynamic")
    assert found.allocated == kept


def test_a_draft_model_reads_its_targets_cache():
    text = {**TEXT, "num_kv_shared_layers": 3, "sliding_window": 8}
    spec = load({"model_type": "gemma4_assistant", "text_config": text})
    assert len(spec.layers) == 3
    assert spec.cache_bytes(100).total == 0


# --- refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAVA_15, "text_config": [1]}, r"text_config: got \[1\]; accepted: a JSON object"),
        ({**LLAVA_15, "text_config": {"model_type": "lama"}}, "model_type: got 'lama'"),
        ({**LLAVA_15, "text_config": {"model_type": ["llama"]}}, "model_type: got"),
        ({"model_type": "internvl_chat", "llm_config": TEXT}, "llm_config.model_type: absent"),
        ({"model_type": "internvl_chat"}, "llm_config.model_type: absent"),
        (
            {"model_type": "internvl", **TEXT},
            "num_hidden_layers: got 3 without text_config; accepted for internvl",
        ),
        (
            {"model_type": "vision-encoder-decoder", "decoder": {**TEXT, "model_type": "llama"}},
            "add_cross_attention: got True; accepted for llama",
        ),
        (
            {**LLAVA_15, "text_config": {"model_type": "llama", "num_attention_heads": 0}},
            "num_attention_heads: got 0",
        ),
    ],
)
def test_refusals_name_the_field(config, message):
    with pytest.raises(ValueError, match=message):
        load(config)


def test_every_wrapper_leads_to_a_family():
    known = {*READERS, *WRAPPERS}
    named = {name: wrapper.otherwise for name, wrapper in WRAPPERS.items() if wrapper.otherwise}
    assert {name: family for name, family in named.items() if family not in known} == {}
