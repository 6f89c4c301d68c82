"""Train the demo's checkpoint, a small MHA model in Llama's style, from random weights.

    python scripts/make_demo_text.py kjv.txt --full kjv_full_train.txt
    python scripts/train_demo_tokenizer.py kjv_full_train.txt tokenizer/
    python scripts/train_demo_model.py kjv_full_train.txt tokenizer/ demo_model/ --steps 2400

Writes a Hugging Face directory in bf16. 2400 steps are two and a half million tokens, twice the
text. The loss on kvjax/data/kjv_heldout.txt, from books the model never sees, is printed last.
"""

import argparse
import json
import tempfile
from pathlib import Path

from kvjax import models, train
from kvjax.models.checkpoint import copy_side_files

HELD_OUT = Path(__file__).resolve().parents[1] / "kvjax" / "data" / "kjv_heldout.txt"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="the training text")
    parser.add_argument("tokenizer", type=Path, help="directory with tokenizer.json")
    parser.add_argument("destination", type=Path, help="directory to make")
    parser.add_argument("--steps", type=int, default=2400)
    arguments = parser.parse_args()

    settings = train.UptrainConfig(
        steps=arguments.steps,
        seq_len=256,
        batch=4,
        learning_rate=2e-3,
        warmup_steps=100,
        weight_decay=0.1,
    )
    with tempfile.TemporaryDirectory() as scratch, train.ProgressBar(settings.total_steps) as bar:
        start = Path(scratch, "random")
        models.save(models.init(CONFIG, seed=0, dtype="bf16"), start)
        copy_side_files(arguments.tokenizer, start)
        report = train.uptrain(
            start,
            arguments.destination,
            arguments.text,
            settings,
            held_out_path=HELD_OUT,
            work_dir=Path(scratch, "run"),
            on_step=bar,
        )
    print(json.dumps({"steps": report.steps, "held_out_nats": report.held_out_after}))


if __name__ == "__main__":
    main()
