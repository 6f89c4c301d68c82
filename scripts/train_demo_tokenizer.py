"""Train the byte-level BPE tokenizer of the demo's checkpoint (extra `text`).

    python scripts/train_demo_tokenizer.py kjv_full_train.txt tokenizer/ --vocab-size 1024

The vocabulary is <|endoftext|> (id 0), the 256 bytes and merges. Writes tokenizer.json and
tokenizer_config.json, which transformers reads too, and prints the bytes per token of the held-out
text.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT = Path(__file__).resolve().parents[1] / "kvjax" / "data" / "kjv_heldout.txt"
END_OF_TEXT = "<|endoftext|>"


def train(text: Path, vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` entries whose merges are the commonest in `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="the training text")
    parser.add_argument("destination", type=Path, help="directory to write to")
    parser.add_argument("--vocab-size", type=int, default=1024)
    arguments = parser.parse_args()

    tokenizer = train(arguments.text, arguments.vocab_size)
    arguments.destination.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.destination / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    config_path = arguments.destination / "tokenizer_config.json"
    config_path.write_text(json.dumps(config, indent=2) + "\n")

    held_out = HELD_OUT.read_text("ascii")
    tokens = tokenizer.encode(held_out).ids
    print(f"{len(held_out) / len(tokens):.3f} bytes per token on {HELD_OUT.name}")


if __name__ == "__main__":
    main()
