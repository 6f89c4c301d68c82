"""One layer's cache as data."""

from dataclasses import dataclass
from fractions import Fraction

from kvjax.sizing.checks import whole
from kvjax.sizing.codecs import CodecSpec, Part
from kvjax.sizing.states import Pool, State

KINDS = ("attention", "latent", "tied", "factors", "state")


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps of each token, and of a sequence.

    By `kind`, a token leaves behind

    - "attention" (MHA, GQA, MQA): K (K, H) and V (K, HV);
    - "latent" (MLA, DeepSeek-AI 2024; GLA, Zadouri et al. 2025): `kv_heads` latents of
      `latent_rank` and `rope_heads` rope keys of `rope_dim`; H and HV are those of the expanded
      heads;
    - "tied" (GTA, Zadouri et al. 2025): (K, H), which is K and V at once, and a rope key;
    - "factors" (TPA, Zhang et al. 2025): `key_rank` + `value_rank` pairs of factors N and H wide,
      side by side, so that a codec has scales for both together;
    - "state": nothing; a Mamba or linear-attention layer, or one without a cache (no `states`).

    With `index_dim` it leaves an index key as well.

    Attributes:
        query_heads: N, a multiple of `kv_heads`; 0 for kind "state".
        kv_heads: K; N for MHA, 1 for MQA (Ainslie et al. 2023) and for MLA.
        key_dim: H.
        value_dim: HV.
        window: the number of keys a query sees, its own included; None for all of them.
        chunk: keys are seen only within their own chunk of so many tokens (Llama 4).
        shares_with: index of the layer whose records this one reads instead of keeping its own
            (cross-layer attention, Brandon et al. 2024); None where it keeps its own.
        cross: whether it attends to the source (an encoder's output, an image), whose records are
            made once and do not grow.
        prompt: learned tokens that the model puts before every sequence, whose records it keeps
            too (CPM-Ant).
        latent_rank: L.
        rope_dim: R, of the rope key that all heads share.
        rope_heads: rope keys beside a latent, each of which some heads share, or all (MHA2MLA, Ji
            et al. 2025, has one for each KV head that the model was converted from).
        query_rank: rank of the query projection's bottleneck; None where it has none.
        key_rank, value_rank: R_K and R_V of TPA.
        index_dim: width of the index key that sparse attention picks tokens by (DeepSeek-V3.2).
        index_top: tokens it picks; None for all.
        index_itemsize: bytes of a number of the index key in transformers' caches where that is not
            the codec's.
        pools: compressed entries beside the records.
        states: states of a fixed size.
        hf: what transformers' cache holds of this layer where that is something else.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    kind: str = "attention"
    window: int | None = None
    chunk: int | None = None
    shares_with: int | None = None
    cross: bool = False
    prompt: int = 0
    latent_rank: int = 0
    rope_dim: int = 0
    rope_heads: int = 1
    query_rank: int | None = None
    key_rank: int = 0
    value_rank: int = 0
    index_dim: int = 0
    index_top: int | None = None
    index_itemsize: int | None = None
    pools: tuple[Pool, ...] = ()
    states: tuple[State, ...] = ()
    hf: "LayerSpec | None" = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: got {self.kind!r}; accepted: {', '.join(KINDS)}")
        if self.kind == "state":
            return
        for name in ("query_heads", "kv_heads", "key_dim", "value_dim", "rope_heads"):
            whole(name, getattr(self, name))
        for name in ("window", "chunk", "query_rank", "index_top"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        for name in ("prompt", "rope_dim", "index_dim"):
            whole(name, getattr(self, name), 0)
        needed = {"latent": ("latent_rank",), "factors": ("key_rank", "value_rank")}
        for name in needed.get(self.kind, ()):
            whole(name, getattr(self, name))
        for name in ("kv_heads", "rope_heads"):
            if self.query_heads % getattr(self, name):
                raise ValueError(
                    f"{name}: got {getattr(self, name)} for {self.query_heads} query heads; "
                    "accepted: a divisor of query_heads"
                )
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"chunk: got {self.chunk} beside a window of {self.window}")

    @property
    def span(self) -> int | None:
        """The most keys a query sees: the window, or the chunk; None for all."""
        return self.chunk if self.window is None else self.window

    def parts(self, tp: int = 1) -> tuple[Part, ...]:
        """The arrays of one token's record on one of `tp` shards, without the index key.

        Heads are spread over the shards, and repeated where there are fewer heads than shards;
        what all heads share is on every shard.
        """
        heads = -(-self.kv_heads // tp)
        rope = (Part(1, self._rope_width, key=True, rope=True),) if self.rope_dim else ()
        match self.kind:
            case "attention":
                return (Part(heads, self.key_dim, key=True), Part(heads, self.value_dim, key=False))
            case "latent":
                return (Part(heads, self.latent_rank, key=False), *rope)
            case "tied":
                return (Part(heads, self.key_dim, key=False), *rope)
            case "factors":
                shard = -(-self.query_heads // tp)
                return (
                    Part(self.key_rank, shard + self.key_dim, key=True),
                    Part(self.value_rank, shard + self.value_dim, key=False),
                )
        return ()

    @property
    def _rope_width(self) -> int:
        """Channels of all rope keys of a token."""
        return self.rope_heads * self.rope_dim

    @property
    def index_parts(self) -> tuple[Part, ...]:
        """The index key of one token, the same on every shard."""
        return (Part(1, self.index_dim, key=True),) if self.index_dim else ()

    def record_bytes(self, rows: int, codec: CodecSpec, tp: int = 1) -> int:
        """Bytes of `rows` live records of one sequence on one of `tp` shards."""
        return sum(codec.live(rows, part) for part in (*self.parts(tp), *self.index_parts))

    def per_token(self, codec: CodecSpec, tp: int = 1) -> Fraction:
        """Bytes that one more token adds while no window is full, in the long run."""
        if self.cross:
            return Fraction(0)
        own = sum(codec.per_token(part) for part in (*self.parts(tp), *self.index_parts))
        pooled = sum(codec.per_token(Part(1, pool.width, True)) / pool.ratio for pool in self.pools)
        return Fraction(own + pooled)

    def state_bytes(self, activation_itemsize: int, tp: int = 1) -> int:
        """Bytes of one sequence's states, those of pools included."""
        pools = sum(
            pool.waiting_bytes(pool.ratio, activation_itemsize)
            + pool.previous_bytes(activation_itemsize)
            for pool in self.pools
        )
        return pools + sum(state.nbytes(activation_itemsize, tp) for state in self.states)

    @property
    def product_widths(self) -> int:
        """Numbers that one query head multiplies and adds for one key: q·k and p·v.

        A latent is decoded absorbed: the key is latent and rope keys, the value the latent.
        """
        if self.kind == "latent":
            return 2 * self.latent_rank + self._rope_width
        return self.key_dim + self.value_dim

    def decode_flop(self, rows: int) -> int:
        """FLOP of one new token's attention over `rows` records: q·k and p·v of N heads."""
        return 2 * self.query_heads * self.product_widths * rows

    def scores(self, tokens: int, tp: int = 1) -> int:
        """Scores q·k of one new token over a sequence of `tokens`, the newest included.

        Those of one of `tp` shards, over which query heads are spread, evenly rounded up. Pool
        entries count as records; the scores by which an index picks tokens are not counted.
        """
        seen = tokens if self.span is None else min(tokens, self.span)
        picked = seen if self.index_top is None else min(seen, self.index_top)
        entries = sum(pool.read(tokens) for pool in self.pools if not pool.index)
        return -(-self.query_heads // tp) * (picked + entries)

    def attention_flop(self, tokens: int, tp: int = 1) -> int:
        """FLOP of the products q·k and p·v that belong to `scores`."""
        return 2 * self.product_widths * self.scores(tokens, tp)

    def attention_parameters(self, d_model: int) -> int:
        """Parameters of the projections q, k, v and o, without biases, norms and indexers.

        A layer that reads another's records has no k and v projections.
        """
        if self.kind == "state":
            return 0
        n, h, hv = self.query_heads, self.key_dim, self.value_dim
        rank = self.query_rank
        q = d_model * n * h if rank is None else rank * (d_model + n * h)
        o = n * hv * d_model
        kept = 0 if self.shares_with is not None else self._kv_parameters(d_model)
        return q + kept + o

    def _kv_parameters(self, d_model: int) -> int:
        h, hv = self.key_dim, self.value_dim
        match self.kind:
            case "latent":
                down = d_model * (self.kv_heads * self.latent_rank + self._rope_width)
                up = self.latent_rank * self.query_heads * (h - self.rope_dim + hv)
                return down + up
            case "tied":
                return d_model * (self.kv_heads * h + self.rope_dim)
            case "factors":
                n = self.query_heads
                return d_model * (self.key_rank * (n + h) + self.value_rank * (n + hv))
        return d_model * self.kv_heads * (h + hv)


def state_layer(*states: State, hf: LayerSpec | None = None) -> LayerSpec:
    """A layer that keeps states and no records; without states, one that keeps nothing."""
    return LayerSpec(0, 0, 0, 0, kind="state", states=states, hf=hf)
