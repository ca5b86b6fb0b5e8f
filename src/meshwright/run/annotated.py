"""Training by placements: a completed program (``plan/tensors.py``) carried out by real processes in float64.

Every rank holds its part of each weight, computes each operator's part with torch, and between them carries out the
transfers of the algebra (``run/placements.py``); gradients take the same way back. Weights, batches and the step (plain
gradient descent) are those of the model's own modules on one process, which every rank trains too, so that losses,
gradients and weights can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.errors import MeshwrightError
from meshwright.layers import algebra
from meshwright.layers.algebra import Placement
from meshwright.layers.signatures import dual, wanted
from meshwright.plan import parse
from meshwright.plan.tensors import PlacedProgram, PlacedStep, backward, forward
from meshwright.run import launch, placements
from meshwright.run.activation import ACTIVATIONS
from meshwright.run.data import Batch
from meshwright.run.mesh import alone
from meshwright.run.rotary import rotate, tables
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.spec.model import Model
from meshwright.spec.naming import names
from meshwright.spec.workload import Train

RATE, SEED = 0.1, 0
#: Where a tensor is: of a layer by its number, of the whole model (None); and its name.
Key = tuple[int | None, str]


class PlacedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of every step under the placements and on one process, and the largest differences of the first step's
    gradients and of the weights behind the last, each over the largest number of its tensor, on any rank."""

    losses: tuple[float, ...]
    alone: tuple[float, ...]
    gradient_error: float
    weight_error: float

    @property
    def worst(self) -> float:
        """The largest of all differences."""
        losses = (abs(a - b) / abs(b) for a, b in zip(self.losses, self.alone))
        return max(self.gradient_error, self.weight_error, *losses)


def start(program: PlacedProgram, model: Model, train: Train, steps: int) -> PlacedRun:
    """Train a model by its placements on processes of this machine, and on one beside.

    Raises:
        MeshwrightError: A003 for a model whose tensors have names of another form.
        RankDied: L001 when a process ends before its time.
    """
    if names(model).qkv or names(model).conv or names(model).unit_offset:
        message = f"{model.name} stores its matrices in another form (family {model.family})"
        help = "a model of the families llama, mistral, olmo or qwen3 is run; this one is priced"
        raise MeshwrightError.one("A003", message, place=f"MODEL {model.name}", help=help)
    ranks = len(list(program.mesh.ranks))
    found = launch.start(_train, program, model, train, steps, num_ranks=ranks, device="cpu")
    return msgspec.convert(found, PlacedRun)


def _train(world: World, program: PlacedProgram, model: Model, train: Train, steps: int) -> dict[str, Any]:
    batch, length = train.global_batch, train.seq_len
    whole = msgspec.structs.replace(train, optimizer="sgd")
    settings = Settings(precision="float64", lr=RATE, clip=0.0, weight_decay=0.0, seed=SEED)
    trainer = Trainer(model, parse(f"mb{batch}").on(1), whole, alone(), settings=settings)
    gradients: list[dict[str, torch.Tensor]] = []
    trainer.before_update.append(
        lambda: gradients.append(_published((h.parameter, h.start, h.stop, h.gradient) for h in trainer.optimizer.held))
    )
    ranks = _Ranks(program, model, world.rank)
    ranks.hold(_own(_pieces(trainer), program, model))
    losses, reference, errors = [], [], [0.0, 0.0]
    for step in range(steps):
        drawn = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, model.vocab, (batch, length + 1), generator=drawn)
        losses.append(ranks.step(tokens))
        reference.append(trainer.step(Batch(tokens, None)).loss)
        if step == 0:
            errors[0] = ranks.error(_own(gradients[0], program, model), ranks.gradients)
        ranks.update(RATE)
    trainer.settle()
    errors[1] = ranks.error(_own(_pieces(trainer), program, model), ranks.weights)
    worst = torch.tensor(errors, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "losses": losses,
        "alone": reference,
        "gradient_error": float(worst[0]),
        "weight_error": float(worst[1]),
    }


def _pieces(trainer: Trainer) -> dict[str, torch.Tensor]:
    return _published((p.parameter, p.start, p.stop, p.values) for p in trainer.pieces() if p.key == "param")


def _published(held) -> dict[str, torch.Tensor]:
    """Published tensors from the pieces of a process that holds all of them."""
    flat: dict[str, tuple[Any, torch.Tensor]] = {}
    for parameter, start, stop, values in held:
        if parameter.name not in flat:
            flat[parameter.name] = parameter, torch.zeros(parameter.shape, dtype=torch.float64).view(-1)
        flat[parameter.name][1][start:stop] = values
    out: dict[str, torch.Tensor] = {}
    for parameter, values in flat.values():
        for part in parameter.parts:
            block = part.view(values.view(parameter.shape))
            tensor = out.setdefault(part.name, torch.zeros(part.shape, dtype=torch.float64))
            tensor[part.region(tuple(block.shape))] = block
    return out


def _own(published: dict[str, torch.Tensor], program: PlacedProgram, model: Model) -> dict[Key, torch.Tensor]:
    """Published tensors as the operators have them: [places of every dim..., each]."""
    n, tensors = names(model), program.network.tensors
    found: dict[Key, torch.Tensor] = {}

    def put(layer: int | None, name: str, tensor: torch.Tensor) -> None:
        if name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up", "mlp.down"):
            tensor = tensor.T
        shape, each = tensors[name].shape, tensors[name].each
        if name == "attention.o":
            found[layer, name] = tensor.reshape(shape[1], shape[0], each).transpose(0, 1)
        else:
            found[layer, name] = tensor.reshape(*shape, each)

    put(None, "embed", published[n.embedding])
    put(None, "norm", published[f"{n.final_norm}.weight"])
    if "head" in tensors:
        put(None, "head", published[f"{n.head}.weight"])
    for layer in range(model.num_layers):
        at = n.layer.format(layer)
        inside = {f"attention.{x}": f"{at}{n.attention}{x}_proj" for x in "qkv"}
        inside |= {"attention.o": f"{at}{n.attention}{n.out}", "mlp.up": f"{at}{n.mlp}{n.up}"}
        inside |= {"mlp.down": f"{at}{n.mlp}{n.down}", "attention.norm": f"{at}{n.norms[0]}"}
        inside |= {"mlp.norm": f"{at}{n.norms[1]}"} | ({"mlp.gate": f"{at}{n.mlp}{n.gate}"} if n.gate else {})
        for name, theirs in inside.items():
            if name in tensors:
                put(layer, name, published[f"{theirs}.weight"])
    return found


class _Ranks:
    """This rank's part of a program: a handler that carries it out."""

    def __init__(self, program: PlacedProgram, model: Model, rank: int):
        self.program, self.model, self.mesh = program, model, program.mesh
        self.me = list(self.mesh.ranks)[rank]
        self.groups = placements.groups_along(self.mesh, rank)
        self.tensors, self.homes = program.network.tensors, program.homes
        self.inside = {n for op in program.network.parts[1] for n in op.inputs if self.tensors[n].weight}
        #: This rank's parts of tensors and of their gradients, by placement; what operators read and made.
        self.values: dict[Key, dict[Placement, torch.Tensor]] = {}
        self.grads: dict[Key, dict[Placement, torch.Tensor]] = {}
        self.saved: dict[tuple[int, str], tuple[list[torch.Tensor], torch.Tensor]] = {}
        self.part, self.at, self.tokens = 0, 0, torch.empty(0)

    def hold(self, weights: dict[Key, torch.Tensor]) -> None:
        """Keep this rank's parts of all weights."""
        self.weights = {k: self.cut(w, self.homes[k[1]]).clone() for k, w in weights.items()}

    def cut(self, whole: torch.Tensor, place: Placement) -> torch.Tensor:
        """This rank's part of a tensor."""
        for p, size, mine in zip(place, self.mesh.sizes, self.me):
            whole = whole.tensor_split(size, dim=p)[mine] if p >= 0 else whole
        return whole

    def step(self, tokens: torch.Tensor) -> float:
        """Forward and backward of a batch [sequences, tokens + 1]; its loss."""
        self.tokens = tokens
        self.values = {k: {self.homes[k[1]]: w.clone().requires_grad_()} for k, w in self.weights.items()}
        self.grads, self.saved = {}, {}
        order = [(part, at) for part, times in enumerate(self.program.network.times) for at in range(times)]
        for self.part, self.at in order:
            forward(self.program, self.part, self)
        home = self.homes["loss"]
        (found,) = self.values[self._key("loss", True)].values()
        self.grads[self._key("loss", True)] = {wanted(home): torch.ones_like(found)}
        for self.part, self.at in reversed(order):
            backward(self.program, self.part, self)
        self.gradients = {k: self.grads[k][wanted(self.homes[k[1]])] for k in self.weights}
        return float(self._carry("loss", home, wanted(home), found.detach()))

    def update(self, rate: float) -> None:
        """A step down the gradient."""
        for key, gradient in self.gradients.items():
            self.weights[key] -= rate * gradient

    def error(self, whole: dict[Key, torch.Tensor], mine: dict[Key, torch.Tensor]) -> float:
        """The largest difference of this rank's parts to those of whole tensors, over the largest number of each."""
        worst = 0.0
        for key, tensor in whole.items():
            apart = (self.cut(tensor, self.homes[key[1]]) - mine[key]).abs()
            worst = max(worst, float(apart.amax() / tensor.abs().max().clamp_min(1e-30)) if apart.numel() else 0.0)
        return worst

    def _key(self, name: str, made: bool) -> Key:
        if name == "hidden":  # what a layer makes is what the next one reads
            before = self.at if self.part == 1 else self.part // 2 * self.program.network.layers
            return before + (made and self.part == 1), name
        if self.tensors[name].weight:
            return (self.at if name in self.inside else None), name
        return (self.at if self.part == 1 else None), name

    def _carry(self, name: str, source: Placement, target: Placement, x: torch.Tensor) -> torch.Tensor:
        axes = [axis for axis, _ in self.mesh.axes]
        for one in algebra.transfers(self.mesh, source, target, self.tensors[name].shape):
            axis = axes.index(one.axis)
            x = placements.carried(one, axis, x, self.mesh.sizes[axis], self.me[axis], self.groups[axis])
        return x

    def move(self, name: str, source: Placement, target: Placement) -> None:
        held = self.values[self._key(name, False)]
        held[target] = self._carry(name, source, target, held[source].detach()).clone().requires_grad_()

    def run(self, step: PlacedStep) -> None:
        op = step.operator
        ins = [self.values[self._key(name, False)][place] for name, place in zip(op.inputs, step.ins)]
        out = ins[0] * 1 if op.kind == "relay" else getattr(self, f"_{op.kind.replace(' ', '_')}")(step, *ins)
        self.saved[self.part * self.program.network.layers + self.at, op.output] = ins, out
        self.values[self._key(op.output, True)] = {step.out: out.detach().requires_grad_()}

    def collect(self, name: str, found: Sequence[Placement], target: Placement, *, made: bool) -> None:
        held = self.grads[self._key(name, made)]
        total = sum((self._carry(name, source, target, held.pop(source)) for source in found), start=0)
        held[target] = total + held[target] if target in held else total

    def back(self, step: PlacedStep) -> None:
        op = step.operator
        ins, out = self.saved.pop((self.part * self.program.network.layers + self.at, op.output))
        grad = self.grads.pop(self._key(op.output, True))[wanted(step.out)]
        for name, place, mine in zip(op.inputs, step.ins, torch.autograd.grad(out, ins, grad)):
            held, left = self.grads.setdefault(self._key(name, False), {}), dual(place, step.out)
            held[left] = held[left] + mine if left in held else mine

    # -- operators on a rank's parts, [sequences, tokens, places of the width, each]

    def _range(self, size: int, place: Placement, dim: int) -> torch.Tensor:
        """The places on a dim that this rank has."""
        return self.cut(torch.arange(size), tuple(0 if p == dim else algebra.REPLICATE for p in place))

    def _rows(self, tokens: torch.Tensor, place: Placement) -> torch.Tensor:
        """This rank's tokens of all [sequences, tokens]."""
        return self.cut(tokens, tuple(p if p in (0, 1) else algebra.REPLICATE for p in place))

    def _lookup(self, step: PlacedStep, table: torch.Tensor) -> torch.Tensor:
        rows = self._range(self.tensors["embed"].shape[0], step.ins[0], 0)
        ids = self._rows(self.tokens[:, :-1], step.out) - (int(rows[0]) if len(rows) else 0)
        here = (ids >= 0) & (ids < len(table))
        return F.embedding(ids * here, table.squeeze(-1)).unsqueeze(-1) * here[..., None, None]

    def _norm(self, step: PlacedStep, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.model.numerics.norm_eps
        return F.rms_norm(x.squeeze(-1), (len(weight),), weight.squeeze(-1), eps).unsqueeze(-1)

    def _product(self, step: PlacedStep, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] > 1 or step.operator.inputs[1] == "attention.o":
            return (x.flatten(2) @ weight.transpose(1, 2).flatten(0, 1)).unsqueeze(-1)
        return (x.squeeze(-1) @ weight.flatten(1)).unflatten(-1, weight.shape[1:])

    def _scores(self, step: PlacedStep, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.squeeze(-1) @ weight.squeeze(-1).T).unsqueeze(-1)

    def _attention(self, step: PlacedStep, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        width, numbers = k.shape[-1], self.model.numerics
        at, every = self._range(self.tensors["hidden"].shape[1], step.ins[0], 1), torch.arange(k.shape[1])
        if step.ins[0] == step.ins[1]:  # keys that are cut as queries are have all tokens
            at = every if len(at) != k.shape[1] else at
        asked = q.unflatten(-1, (-1, width)).flatten(2, 3)  # [b, s, heads, width]
        turned = int(width * numbers.rope_fraction)
        asked = rotate(asked, *tables(at, turned, numbers, q.dtype)).unflatten(2, (k.shape[2], -1))
        keys = rotate(k, *tables(every, turned, numbers, k.dtype))
        scores = torch.einsum("bsgnd,btgd->bgnst", asked, keys) * numbers.scale(width)
        scores = scores.masked_fill(every[None, :] > at[:, None], float("-inf"))
        return torch.einsum("bgnst,btgd->bsgnd", scores.softmax(-1), v).flatten(3)

    def _sum(self, step: PlacedStep, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def _activation(self, step: PlacedStep, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.program.network.block.mlp.activation](x)

    def _gated_activation(self, step: PlacedStep, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._activation(step, gate) * x

    def _loss(self, step: PlacedStep, logits: torch.Tensor) -> torch.Tensor:
        targets = self._rows(self.tokens[:, 1:], step.ins[0])
        lost = F.cross_entropy(logits.squeeze(-1).flatten(0, 1), targets.flatten(), reduction="sum")
        return (lost / self.tokens[:, 1:].numel()).view(1, 1)
