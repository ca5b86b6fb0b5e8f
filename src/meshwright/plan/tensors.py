"""A transformer as operators on tensors, each with its legal placements, and the program that placements make of it.

Every operator says which placements of its inputs, on one axis of a mesh, let every rank compute its part of the result
alone (its signatures). Where a tensor lies otherwise than an operator wants it, ``algebra.transfers`` says what is
exchanged; gradients follow from the same signatures (:func:`dual`). :func:`forward` and :func:`backward` walk through a
program once for whoever prices it and once for whoever carries it out. Xu et al., 2021 (GSPMD, arXiv
2105.04663); Yuan et al., 2021 (OneFlow, arXiv 2110.15032), whose signatures are these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.layers.algebra import AxisMesh, Placement
from meshwright.layers.signatures import dual, wanted
from meshwright.spec.layers import Attention, Block, Dense
from meshwright.spec.model import Model


class PlacedTensor(msgspec.Struct, frozen=True):
    """A tensor of ``shape``; ``each`` numbers lie at every place (those of a group of heads, which no cut divides)."""

    name: str
    shape: tuple[int, ...]
    each: int = 1
    weight: bool = False


class TensorOperator(msgspec.Struct, frozen=True):
    """One operator: its kind, what it reads and what it makes."""

    kind: str
    inputs: tuple[str, ...]
    output: str


class TensorNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a model by name, and its operators in three parts: before the layers, one layer of so many, behind
    them."""

    tensors: dict[str, PlacedTensor]
    parts: tuple[tuple[TensorOperator, ...], ...]
    layers: int
    block: Block

    @property
    def times(self) -> tuple[int, int, int]:
        """How often each part runs."""
        return 1, self.layers, 1


class PlacedStep(msgspec.Struct, frozen=True):
    """An operator with the placements of its inputs and of its result on all axes."""

    operator: TensorOperator
    ins: tuple[Placement, ...]
    out: Placement


class PlacedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A network on a mesh with every placement decided: ``homes`` has where each tensor lies."""

    mesh: AxisMesh
    network: TensorNetwork
    parts: tuple[tuple[PlacedStep, ...], ...]
    homes: dict[str, Placement]


def network(model: Model, batch: int, seq_len: int, relayed: Iterable[str] = ()) -> TensorNetwork:
    """A model's operators on `batch` sequences; activations of `relayed` names are moved on once they are made.

    Raises:
        MeshwrightError: A003 for a model that has other operators.
    """
    wrong = _unlike(model)
    if wrong:
        raise MeshwrightError.one(
            "A003",
            f"{model.name} has {', '.join(wrong)}",
            place=f"MODEL {model.name}",
            help="placements are completed for decoders of one kind of layer: attention by heads and a dense MLP, each "
            "behind an RMSNorm, without biases",
        )
    a, mlp, h = model.blocks[0].attention, model.blocks[0].mlp, model.hidden
    groups, width = a.kv_heads, a.heads // a.kv_heads * a.head_dim
    head = "embed" if model.head.tied else "head"
    made: dict[str, PlacedTensor] = {}

    def weight(name: str, *shape: int, each: int = 1) -> str:
        made[name] = PlacedTensor(name, shape, each, True)
        return name

    def op(kind: str, output: str, *inputs: str, width: int = h, each: int = 1) -> list[TensorOperator]:
        made[output] = PlacedTensor(output, (batch, seq_len, width) if kind != "loss" else (1,), each)
        if output not in relayed and output != "hidden":
            return [TensorOperator(kind, inputs, output)]
        raw = "embedded'" if kind == "lookup" else f"{output}'"
        made[raw] = msgspec.structs.replace(made[output], name=raw)
        return [TensorOperator(kind, inputs, raw), TensorOperator("relay", (raw,), output)]

    def project(output: str, name: str, source: str, wide: int, each: int = 1) -> list[TensorOperator]:
        matrix = weight(name, h, wide, each=each)
        return op("product", output, source, matrix, width=wide, each=each)

    first = op("lookup", "hidden", weight("embed", model.embedding.rows, h))
    layer = [
        *op("norm", "attention.in", "hidden", weight("attention.norm", h)),
        *project("attention.queries", "attention.q", "attention.in", groups, width),
        *project("attention.keys", "attention.k", "attention.in", groups, a.head_dim),
        *project("attention.values", "attention.v", "attention.in", groups, a.head_dim),
        *op(
            "attention",
            "attention.mixed",
            *(f"attention.{what}" for what in ("queries", "keys", "values")),
            width=groups,
            each=width,
        ),
        *op("product", "attention.out", "attention.mixed", weight("attention.o", groups, h, each=width)),
        *op("sum", "between", "hidden", "attention.out"),
        *op("norm", "mlp.in", "between", weight("mlp.norm", h)),
        *(project("mlp.opened", "mlp.gate", "mlp.in", mlp.ffn) if mlp.gated else ()),
        *project("mlp.raised", "mlp.up", "mlp.in", mlp.ffn),
        *(
            op("gated activation", "mlp.inner", "mlp.opened", "mlp.raised", width=mlp.ffn)
            if mlp.gated
            else op("activation", "mlp.inner", "mlp.raised", width=mlp.ffn)
        ),
        *op("product", "mlp.out", "mlp.inner", weight("mlp.down", mlp.ffn, h)),
        *op("sum", "hidden", "between", "mlp.out"),
    ]
    if head not in made:
        weight(head, model.head.rows, h)
    last = [
        *op("norm", "head.in", "hidden", weight("norm", h)),
        *op("scores", "logits", "head.in", head, width=model.head.rows),
        *op("loss", "loss", "logits"),
    ]
    return TensorNetwork(
        tensors=made, parts=(tuple(first), tuple(layer), tuple(last)), layers=model.num_layers, block=model.blocks[0]
    )


def _unlike(model: Model) -> list[str]:
    """Parts of a model that these operators are not."""
    block, numbers = model.blocks[0], model.numerics
    a, mlp = block.attention, block.mlp
    plain = Attention(heads=1, kv_heads=1, head_dim=1, v_head_dim=1, rotary=True)
    sizes = ("heads", "kv_heads", "head_dim", "v_head_dim")
    said = {
        f"{len(model.blocks)} kinds of layers": len(model.blocks) > 1,
        "several streams of tokens": len(model.flows) > 1,
        "layers without attention, or with an MLP that is not dense": a is None or not isinstance(mlp, Dense),
        "norms of another kind or place": block.norm != "rmsnorm" or block.norms != 2 or block.norm_after,
        "attention and MLP side by side": block.parallel or block.ways > 1,
        "parts of layers beside attention and MLP": any(part not in (a, mlp) for part in block.parts),
        "constants of its own": bool(numbers.refused)
        or (numbers.embed_scale, numbers.score_cap, numbers.logit_cap, numbers.clip_qkv) != (1.0, 0.0, 0.0, 0.0),
    }
    if a is not None:
        odd = [f for f in Attention.__struct_fields__ if f not in sizes and getattr(a, f) != getattr(plain, f)]
        said[f"attention with {', '.join(odd)}"] = bool(odd) or a.v_head_dim != a.head_dim
    if isinstance(mlp, Dense):
        said["biases"] = mlp.bias
    ends = (getattr(model.embedding, "positions", 1), getattr(model.head, "bias", True))
    said["another embedding or head"] = any(ends) or getattr(model.head, "norm_vectors", 0) != 1
    return [what for what, here in said.items() if here]


class Handler(Protocol):
    """Actions at every point of a program, which is priced or carried out."""

    def move(self, name: str, source: Placement, target: Placement) -> None:
        """A tensor is moved for the operators that want it at `target`."""

    def run(self, step: PlacedStep) -> None:
        """An operator computes."""

    def collect(self, name: str, found: Sequence[Placement], target: Placement, *, made: bool) -> None:
        """Gradients of a tensor that is `made` or only read in this part, left at these placements, are moved to
        `target` and added up."""

    def back(self, step: PlacedStep) -> None:
        """An operator's gradients are computed."""


def forward(program: PlacedProgram, part: int, handler: Handler) -> None:
    """Walk through the forward of a part: tensors are moved once for all operators that want them alike."""
    moved = set()
    for step in program.parts[part]:
        for name, place in zip(step.operator.inputs, step.ins):
            home = program.homes[name]
            if place != home and (name, place) not in moved:
                moved.add((name, place))
                handler.move(name, home, place)
        handler.run(step)


def backward(program: PlacedProgram, part: int, handler: Handler) -> None:
    """Walk through the backward of a part, to the gradients of its weights and of what it read."""
    left: dict[str, dict[Placement, None]] = {}
    for step in reversed(program.parts[part]):
        target = wanted(step.out)
        handler.collect(step.operator.output, tuple(left.pop(step.operator.output, {target: None})), target, made=True)
        handler.back(step)
        for name, place in zip(step.operator.inputs, step.ins):
            left.setdefault(name, {})[dual(place, step.out)] = None
    for name, found in left.items():
        handler.collect(name, tuple(found), wanted(program.homes[name]), made=False)
