"""The other side of ``executor``: a Llama and its training step written by hand on torch's own parallel parts, and
the same with the Llama of ``transformers``.

Nothing of ``meshwright.run`` is used here but the numbers that initial weights have, so that both train alike:
``DistributedDataParallel``, ``fully_shard`` and ``torch.distributed.pipelining`` do what their documentation shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from meshwright.run.parameters import INIT_STD, initialise
from meshwright.run.pieces import Parameter, Part
from meshwright.run.settings import Settings
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

Step = Callable[[torch.Tensor], tuple[float, float]]
"""Trains this rank's sequences [n, seq_len + 1]; mean loss and gradient norm of the whole job."""


class Attention(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        spec, hidden = model.blocks[0].attention, model.hidden
        self.head_dim, q, kv = spec.head_dim, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden, q, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(model.hidden)), model.numerics.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(model), Attention(model)
        self.post_attention_layernorm, self.mlp = Norm(model), Mlp(model.hidden, model.blocks[0].mlp.ffn)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The layers `which` of a model: tokens [b, s] in for the first ones, hidden states [b, s, hidden] for others;
    logits [b, s, vocab] out of the last ones. Tensors are named as ``transformers`` names them."""

    def __init__(self, model: Model, seq_len: int, which: range):
        super().__init__()
        first, last = 0 in which, model.num_layers - 1 in which
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(model.vocab, model.hidden) if first else None
        self.model.layers = nn.ModuleDict({str(i): Layer(model) for i in which})
        self.model.norm = Norm(model) if last else None
        self.lm_head = nn.Linear(model.hidden, model.vocab, bias=False) if last else None
        half = torch.arange(0, model.blocks[0].attention.head_dim, 2) / model.blocks[0].attention.head_dim
        angles = torch.outer(torch.arange(seq_len), model.numerics.rope_theta**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        _fill(self, model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        for layer in self.model.layers.values():
            x = layer(x, self.cos, self.sin)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))


class Published(nn.Module):
    """The Llama of ``transformers``, as its users train it: tokens [b, s] in, logits [b, s, vocab] out."""

    def __init__(self, model: Model, seq_len: int):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        a = model.blocks[0].attention
        config = LlamaConfig(
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            intermediate_size=model.blocks[0].mlp.ffn,
            num_hidden_layers=model.num_layers,
            num_attention_heads=a.heads,
            num_key_value_heads=a.kv_heads,
            head_dim=a.head_dim,
            max_position_embeddings=seq_len,
            rms_norm_eps=model.numerics.norm_eps,
            rope_theta=model.numerics.rope_theta,
            use_cache=False,
        )
        self.net = LlamaForCausalLM(config)
        _fill(self.net, model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).logits


def _fill(module: nn.Module, model: Model) -> None:
    """The initial weights that a run has."""
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        made = nn.Parameter(torch.empty(shape))
        made.info = Parameter(name, shape, (Part(name, shape, (0,) * len(shape), (slice(None),)),))
        made.init = "ones" if "norm" in name else "normal"
        made.std = (
            INIT_STD / (2 * model.num_layers) ** 0.5
            if name.endswith(("o_proj.weight", "down_proj.weight"))
            else INIT_STD
        )
        initialise([made], Settings().seed)
        with torch.no_grad():
            parameter.copy_(made)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class _Update:
    """Clipping and AdamW; matrices decay."""

    def __init__(self, parameters: Iterator[nn.Parameter], settings: Settings, pipeline: bool):
        self.all, self.settings, self.pipeline = list(parameters), settings, pipeline
        decays = [p for p in self.all if p.ndim > 1]
        others = [p for p in self.all if p.ndim <= 1]
        groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def __call__(self) -> float:
        norm = get_total_norm([p.grad for p in self.all])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.pipeline:
            square = norm**2
            dist.all_reduce(square)
            norm = square.sqrt()
        clip_grads_with_norm_(self.all, self.settings.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def ddp(model: Model, train: Train, microbatch: int, settings: Settings) -> Step:
    """``DistributedDataParallel``; microbatches but the last accumulate inside ``no_sync``."""
    whole = DistributedDataParallel(Llama(model, train.seq_len, range(model.num_layers)), gradient_as_bucket_view=True)
    return _accumulating(whole, _Update(whole.parameters(), settings, False), microbatch, whole.no_sync)


def fsdp(model: Model, train: Train, microbatch: int, settings: Settings) -> Step:
    """``fully_shard`` on every layer and the whole; gradients are reduced after every microbatch."""
    whole = Llama(model, train.seq_len, range(model.num_layers))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*whole.model.layers.values(), whole):
        fully_shard(unit, mesh=mesh)
    return _accumulating(whole, _Update(whole.parameters(), settings, False), microbatch, contextlib.nullcontext)


def published_ddp(model: Model, train: Train, microbatch: int, settings: Settings) -> Step:
    """``DistributedDataParallel`` around the Llama of ``transformers``."""
    whole = DistributedDataParallel(Published(model, train.seq_len), gradient_as_bucket_view=True)
    return _accumulating(whole, _Update(whole.parameters(), settings, False), microbatch, whole.no_sync)


def published_fsdp(model: Model, train: Train, microbatch: int, settings: Settings) -> Step:
    """``fully_shard`` on every layer and the whole of the Llama of ``transformers``."""
    whole = Published(model, train.seq_len)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*whole.net.model.layers, whole):
        fully_shard(unit, mesh=mesh)
    return _accumulating(whole, _Update(whole.parameters(), settings, False), microbatch, contextlib.nullcontext)


def _accumulating(whole: nn.Module, update: _Update, microbatch: int, quiet) -> Step:
    def step(tokens: torch.Tensor) -> tuple[float, float]:
        parts = tokens.split(microbatch)
        total = torch.zeros(())
        for i, part in enumerate(parts):
            with quiet() if i + 1 < len(parts) else contextlib.nullcontext():
                loss = _loss(whole(part[:, :-1]), part[:, 1:]) / len(parts)
                loss.backward()
            total += loss.detach()
        norm = update()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size(), norm

    return step


def one_f_one_b(model: Model, train: Train, microbatch: int, settings: Settings) -> Step:
    """One stage a rank under ``Schedule1F1B``."""
    return _pipelined(model, train, microbatch, settings, 1)


def interleaved(model: Model, train: Train, microbatch: int, settings: Settings) -> Step:
    """Two stages a rank under ``ScheduleInterleaved1F1B``."""
    return _pipelined(model, train, microbatch, settings, 2)


def _pipelined(model: Model, train: Train, microbatch: int, settings: Settings, per_rank: int) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    count = size * per_rank
    width = model.num_layers // count
    modules, stages = [], []
    for number in range(rank, count, size):
        part = Llama(model, train.seq_len, range(number * width, (number + 1) * width))
        modules.append(part)
        stages.append(PipelineStage(part, number, count, torch.device("cpu")))
    num_microbatches = train.global_batch // microbatch
    if per_rank == 1:
        schedule = Schedule1F1B(stages[0], num_microbatches, loss_fn=_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=_loss)
    update = _Update((p for m in modules for p in m.parameters()), settings, True)

    def step(tokens: torch.Tensor) -> tuple[float, float]:
        inputs = (tokens[:, :-1],) if rank == 0 else ()
        losses: list[torch.Tensor] = []
        last = rank == size - 1
        schedule.step(*inputs, target=tokens[:, 1:] if last else None, losses=losses if last else None)
        norm = update()
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        total = total.detach()
        dist.all_reduce(total)
        return float(total), norm

    return step
