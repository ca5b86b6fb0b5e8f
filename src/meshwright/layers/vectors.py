"""Linear layers over vectors of features as pieces: a product with its bias, and ReLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.layers.kind import Flops, Held, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, linear
from meshwright.spec.vectors import FeatureVectors, LinearLayer
from meshwright.spec.workload import DTYPE_BYTES, Train
from meshwright.work import Elementwise

if TYPE_CHECKING:
    from meshwright.plan import Plan


def layer_pieces(c: Context, spec: LinearLayer) -> list[Piece]:
    """The product of each sample, and its ReLU."""
    read, made = c.tokens * spec.inputs * c.element, float(c.tokens * spec.outputs * c.element)
    found = linear(c, "linear", spec.outputs, spec.inputs, bias=True, saved=read, held=read)
    back = Elementwise(num_bytes=3 * made, fused=True)
    return [*found, Piece(name="relu", forward=Elementwise(num_bytes=2 * made), backward=back)]


def no_pieces(c: Context, spec: FeatureVectors) -> list[Piece]:
    """Return nothing: features are read as they are."""
    return []


def held(spec: FeatureVectors | LinearLayer, c: Context) -> Held:
    """Return the parameters, all of which are on every rank and none of which is multiplied below 16 bits."""
    return Held(split=spec.num_params(c.hidden), low=False)


def layer_flops(spec: LinearLayer, tokens: Tokens) -> Flops:
    """Two for each product."""
    return Flops(weights=2 * tokens.rows * spec.inputs * spec.outputs)


def no_flops(spec: FeatureVectors, tokens: Tokens) -> Flops:
    """Return none."""
    return Flops()


def rules(spec: FeatureVectors | LinearLayer, plan: Plan, train: Train) -> Iterator[tuple[str, str]]:
    """Yield what vectors are not cut by, and what they are not computed in."""
    for axis in ("tp", "cp"):
        if (size := getattr(plan.layout, axis)) > 1:
            help = "replicas (dp), sharded state (zero1, fsdp) and pipeline stages (pp) divide the work"
            yield f"{axis}={size}: every rank has whole vectors of features", help
    dtype = plan.precision.compute or train.dtype
    if DTYPE_BYTES[dtype] < 2:
        yield f"{dtype}: features are multiplied in 16 bits or more here", "say dtype=bf16, fp16 or fp32"
    if train.lora is not None:
        yield "phase=lora: linear layers of features have no adapters here", "say phase=pretrain"


KINDS = (
    Kind(name="feature vectors", record=FeatureVectors, pieces=no_pieces, params=held, flops=no_flops, rules=rules),
    Kind(name="linear layer", record=LinearLayer, pieces=layer_pieces, params=held, flops=layer_flops, rules=rules),
)
