"""One layer's cache as data."""

from dataclasses import dataclass

from kvjax.sizing.checks import whole
from kvjax.sizing.codecs import CodecSpec


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps of each token: K (K, H) and V (K, HV).

    Attributes:
        query_heads: N, a multiple of `kv_heads`.
        kv_heads: K; N for MHA, 1 for MQA (Ainslie et al. 2023).
        key_dim: H.
        value_dim: HV.
        kind: "attention"; the only kind so far.
        window: the number of keys a query sees, its own included; None for all of them.
        shares_with: index of the layer whose records this one reads instead of keeping its own
            (cross-layer attention, Brandon et al. 2024); None where it keeps its own.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    kind: str = "attention"
    window: int | None = None
    shares_with: int | None = None

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "key_dim", "value_dim"):
            whole(name, getattr(self, name))
        if self.window is not None:
            whole("window", self.window)
        if self.kind != "attention":
            raise ValueError(f"kind: got {self.kind!r}; accepted: 'attention'")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: got {self.kv_heads} for {self.query_heads} query heads; "
                "accepted: a divisor of query_heads"
            )

    def record_bytes(self, rows: int, codec: CodecSpec, tp: int = 1) -> int:
        """Bytes of `rows` records of one sequence on one of `tp` shards.

        KV heads are spread over the shards, and repeated where there are fewer heads than shards.
        """
        return codec.nbytes(rows, -(-self.kv_heads // tp), self.key_dim, self.value_dim)

    def decode_flop(self, rows: int) -> int:
        """FLOP of one new token's attention over `rows` records: q·k and p·v of N heads."""
        return 2 * self.query_heads * (self.key_dim + self.value_dim) * rows

    def attention_parameters(self, d_model: int) -> int:
        """Parameters of the projections q, k, v and o, without biases.

        A layer that reads another's records has no k and v projections.
        """
        kv_heads = self.kv_heads if self.shares_with is None else 0
        q_and_k = (self.query_heads + kv_heads) * self.key_dim
        v_and_o = (kv_heads + self.query_heads) * self.value_dim
        return d_model * (q_and_k + v_and_o)
