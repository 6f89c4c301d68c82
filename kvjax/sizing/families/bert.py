"""Encoders of BERT's kind that decode when their config says `is_decoder`."""

from dataclasses import replace

from kvjax.sizing.config import Fields, Flag
from kvjax.sizing.families.family import FULL, Family, Reader, sizes
from kvjax.sizing.families.gpt import with_cross


def _decoding(fields: Fields, depth: int) -> tuple[str, ...]:
    """All layers alike; refuses an encoder, which keeps no cache."""
    if not fields.flag(Flag("is_decoder", False)):
        raise ValueError(
            f"is_decoder: got false; accepted for {fields.model_type}: true, since an encoder "
            "keeps no cache"
        )
    return (FULL,) * depth


_BERT = Family(
    sizes(768, 12, 12), kv_heads=None, head_dim=None, kinds=_decoding, layers={FULL: with_cross}
)
_LARGE = replace(_BERT, sizes=sizes(1024, 24, 16))

FAMILIES: dict[str, Reader] = {
    "bert": _BERT,
    "bert-generation": _LARGE,
    "big_bird": _BERT,
    "camembert": _BERT,
    "data2vec-text": _BERT,
    "electra": replace(_BERT, sizes=sizes(256, 12, 4)),
    "ernie": _BERT,
    "megatron-bert": _LARGE,
    "rembert": replace(_BERT, sizes=sizes(1152, 32, 18)),
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT,
    "roc_bert": _BERT,
    "roformer": _BERT,
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": replace(_BERT, sizes=sizes(2560, 36, 32)),
    "xmod": _BERT,
}
