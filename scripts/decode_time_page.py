"""Write the figures of docs/decode_time.md.

    python scripts/decode_time_page.py           # rewrite the marked blocks
    python scripts/decode_time_page.py --check   # fail if one is not what the library computes

A block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; every computed figure of the
page is in one. Needs the standard library and kvjax.sizing alone.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kvjax.sizing import CHIPS, LayerSpec, ModelSpec, Weights, ffn_parameters, sweeps
from kvjax.sizing.roofline import SOFTMAX_FLOP

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "decode_time.md"
FIGURES = ROOT / "tests" / "sizing" / "seed_figures.json"
_BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)

# The article's sweep: its kernel on a B300, K and V of 16,384 tokens for 32 sequences.
CHIP, TOKENS, BATCH, HEADS, WIDTH = "B300", 16_384, 32, 8, 128
# The most rows of a matrix instruction of one multiprocessor (PTX ISA, tcgen05.mma): fewer heads
# are padded to it.
TILE = 128
LATENT_CHIPS = ("H200", "H100-SXM", "B300")


@cache
def printed() -> dict[str, Any]:
    """What the sources print, by the id of the row."""
    return {row["id"]: row["expected"] for row in json.loads(FIGURES.read_text())}


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def bullets(*texts: str) -> str:
    lines = [" ".join(text.split()) for text in texts]
    return "\n".join(
        textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  ") for line in lines
    )


def model(layers: int, query_heads: int, kv_heads: int, d_model: int = 8192) -> ModelSpec:
    layer = LayerSpec(query_heads, kv_heads, WIDTH, WIDTH)
    return ModelSpec("test", d_model, (layer,) * layers)


def latent(layers: int = 1) -> ModelSpec:
    """MLA as in DeepSeek-V3: 128 heads of 128 + 64, a latent of 512."""
    mla = LayerSpec(128, 1, 192, 128, kind="latent", latent_rank=512, rope_dim=64)
    return ModelSpec("deepseek_v3", 7168, (mla,) * layers)


def guide_model() -> ModelSpec:
    """The guide's model: 64 layers of GQA-8 and as many weights as it counts."""
    bare = model(64, 64, 8, 5120)
    return ModelSpec(
        "qwen3_vl", 5120, bare.layers, Weights(33_357_390_064 - bare.attention_parameters)
    )


def chips() -> str:
    rows = []
    for name, chip in CHIPS.items():
        vector, exponentials = chip.vector_flops, chip.exponentials_per_second
        rows.append(
            (
                name,
                f"{chip.bytes_per_second / 1e12:.4g}",
                f"{chip.bf16_flops / 1e12:.4g}",
                "–" if vector is None else f"{vector / 1e12:.4g}",
                "–" if exponentials is None else f"{exponentials / 1e12:.3g}",
                f"{chip.ridge:.0f}",
                "–" if chip.vector_ridge is None else f"{chip.vector_ridge:.1f}",
            )
        )
    head = ("TB/s", "bf16 matrix TFLOP/s", "f32 vector TFLOP/s", "10¹² exp/s")
    return table(("chip", *head, "matrix ridge FLOP/B", "vector ridge FLOP/B"), rows)


def sizes() -> str:
    said, mha, gqa = printed(), model(80, 64, 64), model(80, 64, 8)
    saved = mha.attention_parameters - gqa.attention_parameters
    found = {
        "mha7b.bytes_per_token": model(32, 32, 32).bytes_per_token(),
        "fp8.7b": model(32, 32, 32).bytes_per_token("fp8"),
        "mha70b.bytes_per_token": mha.bytes_per_token(),
        "mha70b.8k": mha.cache_bytes(8192).allocated,
        "mha70b.8k.b32": mha.cache_bytes(8192, 32).allocated,
        "gqa70b.8k.b32": gqa.cache_bytes(8192, 32).allocated,
        "params.gqa_saving_70b": saved,
        "params.gqa_attention_layer": gqa.attention_parameters // 80,
        "params.ffn_layer": ffn_parameters(8192, 28_672),
        "mla.v3.per_token": latent(61).bytes_per_token(),
        "q3vl.weights": guide_model().weight_bytes("f16"),
    }
    return table(
        ("row", "printed", "computed"),
        ((f"`{row}`", f"{said[row]:,.0f}", f"{value:,}") for row, value in found.items()),
    )


def differences() -> str:
    guide = guide_model()
    weights, per_token = guide.weight_bytes("f16"), guide.bytes_per_token("f16")
    true, rounded = (
        guide.decode_floor("H100-SXM", 8192, weight_bytes=nbytes, codec="f16").seconds
        for nbytes in (weights, 65e9)
    )
    fits = sweeps.batch_ceiling(guide, "H100-SXM", 8192, "f16")
    needed = (65e9 + guide.cache_bytes(8192, 16, "f16").total) / 1e9
    on_h200 = sweeps.batch_ceiling(guide, "H200", 8192, "f16")
    crossover = sweeps.crossover_tokens(guide, codec="f16")
    return bullets(
        f"""Cache equal to weights: the guide prints 254,500 tokens and, later, about 248,000. Its
        weights are {weights / 1e9:.1f} GB, which makes **{crossover:,}**; the other figure is 65 GB
        over {per_token:,} bytes: {65e9 / per_token:,.0f}.""",
        f"""Its decode floors take 65 GB of weights: {rounded * 1e3:.1f} ms for one sequence of
        8,192 tokens on an H100. With the {weights / 1e9:.1f} GB that it counts elsewhere it is
        {true * 1e3:.1f} ms.""",
        f"""Its floor for 16 such sequences is right as a time and cannot be had on one chip:
        weights and cache are {needed:.0f} GB, on a chip of 80. **{fits}** sequences fit on an H100
        with nothing beside them ({on_h200} on an H200). The guide's own capacity row, 20,162
        tokens, says so too.""",
        """Article and blog agree on bytes a token: one counts bf16, the other f16, two bytes
        both.""",
    )


def intensity() -> str:
    rows = []
    for name, kv_heads in (("MHA", 64), ("GQA-8", 8), ("MQA", 1)):
        spec = model(1, 64, kv_heads)
        found = [f"{spec.intensity(codec):g}" for codec in ("f32", "bf16", "fp8")]
        rows.append((name, 64 // kv_heads, *found))
    return table(("64 query heads", "group G", "f32", "bf16", "fp8"), rows)


def ridges() -> str:
    h100, b300 = CHIPS["H100-SXM"], CHIPS["B300"]
    return table(
        ("", "TFLOP/s", "TB/s", "FLOP/B"),
        (
            ("H100, dense", 989.5, 3.35, f"**{h100.ridge:.0f}**"),
            ("H100, with 2:4 sparsity", 2000, 3.35, f"{2000e12 / h100.bytes_per_second:.0f}"),
            ("B300, dense", 2250, 8, f"**{b300.ridge:.0f}**"),
        ),
    )


def attention(kv_heads: int) -> ModelSpec:
    """One attention layer of the article's sweep."""
    return model(1, HEADS, kv_heads)


@cache
def measured_seconds(kv_heads: int) -> float:
    """What the article's share of peak bandwidth makes of a step's bytes."""
    share = printed()[f"sweep.bandwidth.g{HEADS // kv_heads}"]
    nbytes = attention(kv_heads).cache_bytes(TOKENS, BATCH).read_per_step
    return nbytes / (share * CHIPS[CHIP].bytes_per_second)


def eightfold() -> str:
    chip = CHIPS[CHIP]
    assert chip.vector_flops
    assert chip.exponentials_per_second
    columns = []
    for kv_heads in (HEADS, 1):
        spec, seconds = attention(kv_heads), measured_seconds(kv_heads)
        flop = BATCH * spec.attention_flop(TOKENS)
        rate, scores = flop / seconds, BATCH * spec.scores(TOKENS)
        columns.append(
            (
                f"{spec.cache_bytes(TOKENS, BATCH).read_per_step / 1e6:,.1f} MB",
                f"{printed()[f'sweep.bandwidth.g{HEADS // kv_heads}']:.1%}",
                f"{seconds * 1e6:.0f} µs",
                f"{flop / 1e9:.2f} GFLOP",
                f"{rate / 1e12:.1f} TFLOP/s",
                f"{rate / chip.bf16_flops:.1%}",
                f"{rate / chip.vector_flops:.0%}",
                f"{scores / seconds / chip.exponentials_per_second:.2%}",
            )
        )
    names = (
        "K and V read, computed",
        "share of peak bandwidth, measured by the article",
        "time of a step, from these two",
        "products q·k and p·v, computed",
        "rate of products, from these",
        "of it: share of the bf16 matrix rate",
        "of it: share of the f32 vector rate",
        "share of the exponential rate",
    )
    return table(
        (f"{CHIP}, {BATCH} × {TOKENS:,} tokens, {HEADS} query heads of {WIDTH}", "G = 1", "G = 8"),
        zip(names, *columns, strict=True),
    )


def ceilings() -> str:
    rows = []
    for name, products in (
        ("memory", "matrix"),
        ("matrix", "matrix"),
        ("vector", "matrix"),
        ("vector", "vector"),
        ("exponential", "matrix"),
    ):
        found = [
            attention(kv_heads)
            .decode_floor(CHIP, TOKENS, BATCH, weight_bytes=0, products=products)
            .ceilings[name]
            for kv_heads in (HEADS, 1)
        ]
        what = {"matrix": "products", "vector": "products and softmax"}.get(name, "")
        if (name, products) == ("vector", "matrix"):
            what = "softmax alone"
        label = f"{name}: {what}" if what else name
        rows.append((label, *(f"{seconds * 1e6:.1f} µs" for seconds in found)))
        if name == "matrix":
            padded = [found[0] * TILE, found[1] * TILE / HEADS]
            rows.append(
                (f"matrix: heads padded to {TILE}", *(f"{each * 1e6:.1f} µs" for each in padded))
            )
    return table(("ceiling", "G = 1", "G = 8"), rows)


def verdict() -> str:
    chip = CHIPS[CHIP]
    assert chip.vector_flops
    before, after = measured_seconds(HEADS), measured_seconds(1)
    flop, scores = (
        BATCH * count(TOKENS) for count in (attention(1).attention_flop, attention(1).scores)
    )
    mqa = attention(1).decode_floor(CHIP, TOKENS, BATCH, weight_bytes=0)
    on_vector = attention(1).decode_floor(CHIP, TOKENS, BATCH, weight_bytes=0, products="vector")
    ratio = attention(HEADS).decode_floor(CHIP, TOKENS, BATCH, weight_bytes=0).seconds / mqa.seconds
    busy = on_vector.ceilings["vector"] / on_vector.ceilings["memory"]
    turn = before / after
    said = printed()
    return bullets(
        f"""The two bandwidths make a ratio of **{turn:.2f}**; the article prints
        {said["sweep.latency.b32.16k"]} for it (and {said["sweep.latency.b64.64k"]} for 64 × 65,536
        tokens). The rows agree.""",
        f"""Exponentials are not the cause: the kernel did {scores / 1e6:.1f} million in
        {after * 1e6:.0f} µs, and the chip does as many in
        {mqa.ceilings["exponential"] * 1e6:.1f} µs.""",
        f"""The kernel reached none of the four peaks. Nearest, after memory, is the f32 rate
        outside the matrix units. There products and softmax have to run at {busy:.0%} of the peak
        for memory to stay busy at G = 8; the kernel reached {flop / after / chip.vector_flops:.0%},
        as a loop may that converts, loads and reduces beside each multiply-add.""",
        f"""With products capped at the rate that G = 8 had ({flop / after / 1e12:.1f} TFLOP/s),
        fewer bytes stop helping beyond G = {turn:.1f}: G = 4 and G = 8 would take the same time.
        That is a prediction that a sweep can refute.""",
        f"""On the matrix units memory binds at every G, even with the heads of a group padded to a
        tile. The floor at G = 8 is **{mqa.seconds * 1e6:.1f} µs**, {after / mqa.seconds:.1f} times
        less than measured, and the ratio from G = 1 is **{ratio:.1f}**.""",
    )


def mla() -> str:
    rows = []
    for form, spec in (("absorbed", latent()), ("expanded", latent().expanded())):
        binds = [spec.decode_floor(chip, 8192, 64, weight_bytes=0).binds for chip in LATENT_CHIPS]
        rows.append((form, f"{spec.bytes_per_token():,}", f"{spec.intensity():.0f}", *binds))
    heads = [f"{name} (ridge {CHIPS[name].ridge:.0f})" for name in LATENT_CHIPS]
    return table(("128 heads", "B a token and layer", "FLOP/B", *heads), rows)


def shards() -> str:
    rows = []
    for tp in (1, 2, 4, 8):
        spec = latent()
        work = spec.attention_flop(8192, tp=tp) / spec.cache_bytes(8192, tp=tp).read_per_step
        floor = spec.decode_floor("H200", 8192, 64, weight_bytes=0, tp=tp)
        rows.append((tp, 128 // tp, f"{work:.0f}", floor.binds, f"{floor.seconds * 1e6:.0f} µs"))
    return table(("shards", "heads each", "FLOP/B", "binds on an H200", "floor of a layer"), rows)


def batching() -> str:
    guide = guide_model()
    rows = []
    for chip in ("H100-SXM", "H200"):
        most = sweeps.batch_ceiling(guide, chip, 8192, "f16", weight_bytes=65e9)
        sweep = sweeps.batch_sweep(
            guide, chip, 8192, (1, 16, 64), codec="f16", weight_bytes=65e9, weight_codec="f16"
        )
        for row in sweep:
            alone = guide.decode_floor(chip, 8192, row["batch"], weight_bytes=0, codec="f16")
            gain = row["tokens_per_second"] / sweep[0]["tokens_per_second"]
            rows.append(
                (
                    chip,
                    row["batch"],
                    "yes" if row["batch"] <= most else "no",
                    f"{row['floor_seconds'] * 1e3:.1f} ms",
                    f"{row['tokens_per_second']:,.0f}",
                    f"{gain:.1f}",
                    f"{alone.seconds / row['batch'] * 1e3:.3f} ms",
                )
            )
    head = ("chip", "batch", "fits", "floor", "tokens/s", "gain", "attention alone, a sequence")
    return table(head, rows)


def prefill() -> str:
    rows = []
    for name, spec in (("MHA", model(1, 64, 64)), ("GQA-8", model(1, 64, 8))):
        for tokens in (512, 8192):
            flop = spec.attention_flop(1) * tokens * (tokens + 1) // 2
            work = flop / spec.cache_bytes(tokens).read_per_step
            rows.append((name, f"{tokens:,}", f"{spec.intensity():g}", f"{work:,.0f}"))
    return table(("64 query heads", "tokens", "decode FLOP/B", "causal prefill FLOP/B"), rows)


def softmax() -> str:
    return bullets(
        f"""softmax's own work, {SOFTMAX_FLOP} FLOP a score outside the matrix units: a comparison
        with the running maximum (1), scale and subtraction in one multiply-add (2), an addition to
        the running sum (1). Rescaling happens once a block, masks and conversions can be left out:
        it is a least count;"""
    )


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block
    for block in (
        *(chips, softmax, sizes, differences, intensity, ridges, eightfold, ceilings, verdict),
        *(mla, shards, batching, prefill),
    )
}


def rewritten(page: str) -> str:
    """The page with every block as the library computes it."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    check = parser.parse_args().check
    page = PAGE.read_text()
    missing = set(BLOCKS) - {found[2] for found in _BLOCK.finditer(page)}
    if missing:
        sys.exit(f"{PAGE}: no block for {', '.join(sorted(missing))}")
    if check and rewritten(page) != page:
        sys.exit(f"{PAGE}: not what the library computes; run {Path(__file__).name}")
    if not check:
        PAGE.write_text(rewritten(page))


if __name__ == "__main__":
    main()
