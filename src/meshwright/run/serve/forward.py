"""The forward of serving: a rank's layers over the packed tokens of an iteration, from hidden states or tokens to
scores over the vocabulary.

Layers, loading and tensor parallelism are those of training (:mod:`meshwright.run.parts`); attention alone is another,
:class:`~meshwright.run.serve.paged.PagedCore`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.lower.partition import stage_layers
from meshwright.plan import Plan
from meshwright.run.collect import all_gather
from meshwright.run.mesh import ProcessMesh
from meshwright.run.model import Stage
from meshwright.run.parameters import Maker, initialise
from meshwright.run.parts import EmbeddingModule, Pass, Shared
from meshwright.run.pieces import PARAM, TensorPiece
from meshwright.run.rotary import rotaries
from meshwright.run.self_attention import HeadsCore
from meshwright.run.serve.adapted import AdapterWeights
from meshwright.run.serve.heavy import HeavyBlocks, HeavyCore, WholeCore, precise
from meshwright.run.serve.kv_sent import KvPort
from meshwright.run.serve.packed import PackedTokens
from meshwright.run.serve.paged import KvBlocks, PagedCore, kv_shape
from meshwright.run.serve.shadow import SHADOW, ShadowBlocks, ShadowCore
from meshwright.run.serve.stored import pack, store
from meshwright.run.weights import load_weights
from meshwright.spec import naming
from meshwright.spec.model import Model


class ServedLayers:
    """The layers of a model on one rank of a serving plan, with their keys and values once :meth:`cache` made room.

    They are those of its stage; or some ``layers`` alone, without the model's ends; where these are none it is the ends
    alone."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        mesh: ProcessMesh,
        *,
        dtype: torch.dtype,
        seed: int = 0,
        layers: tuple[int, ...] | None = None,
    ):
        self.model, self.plan, self.mesh, self.dtype = model, plan, mesh, dtype
        #: The distance of stored weights from the published ones, relative to their size.
        self.rounding = 0.0
        shared = Shared(
            model=model,
            plan=plan,
            mesh=mesh,
            make=Maker(mesh.device, dtype),
            names=naming.names(model),
            dropout=0.0,
            seed=seed,
            causal=True,
        )
        parts, me = stage_layers(plan, model), mesh["pp"].index
        self.first, self.last = me == 0, me == len(parts) - 1
        self.partly = layers is not None
        if layers is None:
            layers = parts[me]
        else:
            self.first = self.last = not layers
        modes = ("none",) * len(layers)
        self.stage = Stage(shared, me, layers, modes, first=self.first, last=self.last)
        self.stage.requires_grad_(False)
        self.kv: KvBlocks | ShadowBlocks | None = None
        self.adapters: AdapterWeights | None = None
        self.port: KvPort | None = None
        self._turns: dict[str, tuple[torch.Tensor, torch.Tensor] | None] | None = None
        self._turned = 0

    def load(self, folder: Path) -> None:
        """Fill the parameters with published weights; collective over the mesh.

        Raises:
            MeshwrightError: H006 or H007 where they are not there or do not fit.
        """
        pieces = [TensorPiece(PARAM, p.info, 0, p.numel(), p.data.view(-1), True) for p in self.stage.parameters()]
        load_weights(folder, pieces, self.model, self.mesh["world"], device=self.mesh.device, partly=self.partly)
        self._settle()

    def draw(self, seed: int) -> None:
        """Fill the parameters with random values."""
        initialise(self.stage.parameters(), seed)
        self._settle()

    def _settle(self) -> None:
        """Store weights as the plan says. On a processor, large matrices of layers that stay whole lie in tiles, and
        what else there is by columns, with which libraries multiply a few rows in two thirds of the time."""
        precision = self.plan.precision
        if precision.weights or precision.experts:
            self.rounding = store(self.stage, precision.weights, precision.experts_format)
        if self.mesh.device.type != "cpu" or self.dtype not in (torch.float32, torch.float64):
            return
        if self.dtype is torch.float32 and torch.backends.mkldnn.is_available():
            pack(self.stage)
        looked_up = [m for m in self.stage.modules() if isinstance(m, EmbeddingModule)]
        apart = {id(p) for module in looked_up for p in module.parameters()}
        for parameter in self.stage.parameters():
            if parameter.dim() > 1 and id(parameter) not in apart:
                parameter.data = parameter.data.mT.contiguous().mT

    def adapt(self, folders: Sequence[str]) -> None:
        """Read LoRA adapters; raises as :class:`~meshwright.run.serve.adapted.AdapterWeights`."""
        self.adapters = AdapterWeights(self.stage.layers.parameters(), self.model, folders, self.mesh.device)

    @property
    def cores(self) -> list[HeadsCore]:
        """The cores of attention, in order of their layers."""
        return [module for module in self.stage.modules() if isinstance(module, HeadsCore)]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values on this rank."""
        return sum(heads * (d + value) for heads, d, value in map(kv_shape, self.cores)) * self.dtype.itemsize

    @property
    def mark_bytes(self) -> int:
        """Bytes beside a token's keys and values, where a budget keeps the position and the sum of each."""
        return sum(kv_shape(core)[0] for core in self.cores) * (4 + precise(self.dtype).itemsize)

    def cache(self, blocks: int, block: int, budget: tuple[str, float] | None = None) -> None:
        """Make room for so many blocks; under a budget of that name and number, where one is said."""
        said = {"dtype": self.dtype, "device": self.mesh.device}
        if budget is None:
            self.kv = KvBlocks(self.cores, blocks, block, **said)
        elif budget[0] == SHADOW:
            self.kv = ShadowBlocks(self.cores, share=budget[1], **said)
        else:
            self.kv = HeavyBlocks(self.cores, blocks, block, share=budget[1], **said)

    @torch.inference_mode()
    def __call__(self, packed: PackedTokens, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Scores [wanted, vocab] of the last stage, or hidden states [tokens, 1, hidden] of another; `hidden` are those
        of the stage before."""
        if self.adapters is not None:
            self.adapters.begin(packed)
        p = self._pass(packed)
        x = self.stage.embedding(p) if self.first else hidden
        for layer in self.stage.layers:
            x = layer(x, p)
        return self.scores(packed, x) if self.last else x

    @torch.inference_mode()
    def embedded(self, packed: PackedTokens) -> torch.Tensor:
        """Hidden states [tokens, 1, hidden] of tokens before the first layer, of who has the model's first end."""
        return self.stage.embedding(self._pass(packed))

    @torch.inference_mode()
    def through(self, packed: PackedTokens, hidden: torch.Tensor, some: slice) -> torch.Tensor:
        """Hidden states [tokens, 1, hidden] behind some of the layers, from those before them."""
        p, x = self._pass(packed), hidden
        for layer in self.stage.layers[some]:
            x = layer(x, p)
        return x

    @torch.inference_mode()
    def scores(self, packed: PackedTokens, x: torch.Tensor) -> torch.Tensor:
        """Scores [wanted, vocab] of hidden states [tokens, 1, hidden] behind the last layer."""
        if not packed.wanted:
            return x.new_empty((0, self.model.vocab))
        if len(packed.wanted) < len(packed.tokens):
            x = x[torch.tensor(packed.wanted, device=self.mesh.device)]
        return self._scores(self.stage.head.logits(x)[:, 0])

    def _pass(self, packed: PackedTokens) -> Pass:
        """The arguments of the layers in an iteration."""
        device = self.mesh.device
        tokens = torch.tensor([packed.tokens], device=device)
        positions = torch.tensor(packed.positions, device=device)
        if packed.whole:
            core = WholeCore()
        elif isinstance(self.kv, HeavyBlocks):
            core = HeavyCore(self.kv, packed.rows)
        elif isinstance(self.kv, ShadowBlocks):
            core = ShadowCore(self.kv, packed.rows, self._turns_of)
        else:
            core = None if self.kv is None else PagedCore(self.kv, packed.rows, self.dtype)
        return Pass(
            tokens=tokens,
            targets=tokens,
            positions=positions,
            documents=None,
            **self._rotary(positions, max(packed.positions)),
            rows=positions.unsqueeze(1),
            scale=1.0,
            step=-1,
            core=core,
        )

    def _scores(self, mine: torch.Tensor) -> torch.Tensor:
        """Scores of all of the vocabulary from this rank's columns."""
        tp = self.mesh["tp"]
        if tp.alone:
            return mine
        whole = all_gather(mine.T.contiguous(), tp).T
        return whole[:, : self.model.vocab]

    def _turns_of(self, module: HeadsCore, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines of a layer at positions that were computed before."""
        return self._rotary(positions, int(positions.max()))["rotary"] if module.spec.rotary else None

    def _rotary(self, positions: torch.Tensor, most: int) -> dict[str, tuple[torch.Tensor, torch.Tensor] | None]:
        """Cosines and sines of positions, from tables that grow."""
        if self._turns is None or self._turned <= most:
            self._turned = max(256, 1 << most.bit_length())
            self._turns = rotaries(torch.arange(self._turned, device=positions.device), self.model, self.dtype)
        some = self._turns.items()
        return {name: two and tuple(table.index_select(0, positions) for table in two) for name, two in some}
