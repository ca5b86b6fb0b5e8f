"""A model from its dimensions, as papers and tables of measurements give them, without a configuration file.

Two shapes cover most of them: the GPT of Radford et al. (2019) and Megatron-LM (2104.04473), with LayerNorm, plain
MLP, biases and learned positions, and the Llama of Touvron et al. (2302.13971), with RMSNorm, gated MLP, rotary
positions and no biases. `gated` picks one; every other argument can depart from it.
"""

from __future__ import annotations

from typing import Any, Literal

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.architecture import Model, stack
from meshwright.spec.families.parts import ends
from meshwright.spec.families.reader import MAX_LAYERS
from meshwright.spec.layers import Attention, Block, Dense, Moe


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    gated: bool = False,
    experts: int = 0,
    top_k: int = 0,
    moe_ffn: int | None = None,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    moe_every: int = 1,
    shortcut: bool = False,
    bias: bool | None = None,
    norm: Literal["rmsnorm", "layernorm"] | None = None,
    positions: Literal["learned", "rotary", "none"] | None = None,
    tied_embeddings: bool | None = None,
    parallel: bool = False,
    qk_norm: bool = False,
    window: int = 0,
    max_seq_len: int = 2048,
    name: str = "transformer",
    source: str = "",
) -> Model:
    """A decoder of these dimensions: GPT-like, or Llama-like when `gated`.

    Args:
        ffn: inner width of the MLP; 4 * hidden when absent, except for a gated one, which has no usual width.
        experts: routed experts per layer, 0 = dense; then `top_k` and `moe_ffn` (default `ffn`) are needed.
        shared_ffn: total inner width of the shared experts.
        dense_layers: so many first layers keep a dense MLP of width `ffn`.
        moe_every: of those behind them the last of every so many has experts, the others a dense MLP.
        shortcut: routed experts read what entered their block, before its attention (ScMoE, 2404.05019).
        bias: biases on all projections; absent: exactly when not gated.
        norm: absent: RMSNorm when gated, LayerNorm with bias otherwise.
        positions: absent: rotary when gated, learned otherwise (`max_seq_len` rows); ``none`` for ALiBi.
        tied_embeddings: absent: exactly when not gated.
        qk_norm: one RMSNorm of head width on queries and one on keys.
        window: sliding window of all layers in tokens, 0 = full.

    Raises:
        MeshwrightError: M002, M003 with every dimension that is not a positive whole number or does not divide.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "max_seq_len": max_seq_len}
    optional = {"ffn": ffn, "kv_heads": kv_heads, "head_dim": head_dim, "moe_ffn": moe_ffn}
    counts = {"experts": experts, "top_k": top_k, "shared_ffn": shared_ffn, "dense_layers": dense_layers}
    counts["window"] = window
    sizes["moe_every"] = moe_every
    given = sizes | {key: value for key, value in optional.items() if value is not None}
    faults = _whole(given, 1, name) + _whole(counts, 0, name)
    faults = faults or _contradictions(given | counts, gated, name)
    if faults:
        raise MeshwrightError(faults)

    head_width = head_dim or hidden // heads
    biased = bias if bias is not None else not gated
    norm = norm or ("rmsnorm" if gated else "layernorm")
    positions = positions or ("rotary" if gated else "learned")
    activation = "silu" if gated else "gelu"
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_width,
        v_head_dim=head_width,
        rotary=positions == "rotary",
        window=window,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=qk_norm,
        qk_norm_params=2 * head_width if qk_norm else 0,
    )

    def layer(mlp: Dense | Moe) -> Block:
        norm_vectors = 1 if norm == "rmsnorm" else 2
        return Block(attention=attention, mlp=mlp, norm=norm, norms=2, norm_vectors=norm_vectors, parallel=parallel)

    dense = Dense(ffn=ffn or 4 * hidden, gated=gated, bias=biased, activation=activation)
    mlps: list[Dense | Moe] = [dense] * layers
    if experts:
        moe = Moe(
            experts=experts,
            top_k=top_k,
            ffn=moe_ffn or dense.ffn,
            gated=gated,
            bias=biased,
            shared_ffn=shared_ffn,
            activation=activation,
            shortcut=shortcut,
        )
        for routed in range(dense_layers + moe_every - 1, layers, moe_every):
            mlps[routed] = moe
    blocks, pattern = stack(layer(mlp) for mlp in mlps)
    embedding, head = ends(
        vocab,
        blocks[0].norm_vectors,
        tied=tied_embeddings if tied_embeddings is not None else not gated,
        learned_positions=max_seq_len if positions == "learned" else 0,
    )
    return Model(
        name=name,
        family="transformer",
        hidden=hidden,
        embedding=embedding,
        blocks=blocks,
        pattern=pattern,
        head=head,
        max_seq_len=max_seq_len,
        source=source,
    )


def _whole(values: dict[str, Any], low: int, name: str) -> list[Diagnostic]:
    return [
        Diagnostic(code="M002", message=f"{key} must be a whole number from {low} ({name})", place=f"{key} = {value!r}")
        for key, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < low
    ]


def _contradictions(d: dict[str, int], gated: bool, name: str) -> list[Diagnostic]:
    """Return a diagnostic for each contradiction between the dimensions `d` of a decoder, each valid by itself."""
    found = []

    def refuse(code: str, message: str, help: str) -> None:
        found.append(Diagnostic(code=code, message=f"{message} ({name})", help=help))

    heads, hidden, layers = d["heads"], d["hidden"], d["layers"]
    if "head_dim" not in d and hidden % heads:
        refuse("M003", f"heads={heads} does not divide hidden={hidden}", "give head_dim, or mend one of the two")
    if heads % d.get("kv_heads", 1):
        refuse("M003", f"kv_heads={d['kv_heads']} does not divide heads={heads}", "heads share key-value heads evenly")
    if layers > MAX_LAYERS:
        refuse("M002", f"layers={layers} is more than {MAX_LAYERS}", "")
    dense_layers = d["dense_layers"] if d["experts"] else layers
    if dense_layers > layers:
        refuse("M003", f"dense_layers={dense_layers} is more than layers={layers}", "")
    needs_ffn = dense_layers > 0 or d["moe_every"] > 1 or "moe_ffn" not in d
    if gated and "ffn" not in d and needs_ffn:
        refuse("M001", "ffn is missing", "a gated MLP has no usual width: give ffn (Llama 2 7B has 11008 for 4096)")
    if d["experts"] and not 1 <= d["top_k"] <= d["experts"]:
        refuse("M003", f"top_k={d['top_k']} must be from 1 to experts={d['experts']}", "")
    for key in ("top_k", "moe_ffn", "shared_ffn", "dense_layers"):
        if d.get(key) and not d["experts"]:
            refuse("M003", f"{key}={d[key]} without experts", "give experts, or leave it out")
    return found
