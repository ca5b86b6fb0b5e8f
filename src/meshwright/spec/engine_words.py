"""The words of a serving engine: how it batches, what its cache holds, and what it guesses, fetches and sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.quantity import parse_bytes
from meshwright.spec.beside import BatchJobs, batch_jobs
from meshwright.spec.peer_chains import PeerChains, peer_chains
from meshwright.spec.power_row import PowerRow, power_row
from meshwright.spec.serve_values import (
    count,
    counted_name,
    file_name,
    num_requests,
    numbered_name,
    one_of,
    policy_name,
    positive,
    token_budget,
    yes_no,
)
from meshwright.spec.zoo import Zoo, zoo

#: How those come back whose cache was taken.
PREEMPTIONS = ("recompute", "swap")
#: Batching policies of engines that do not batch as vLLM V1, by their profile: theirs where none is said.
OWN_POLICIES = {"trtllm": "trtllm"}
#: Bytes of a number in the cache of keys and values; of int8 with a scale in fp32 for a head of 128 (2407.00029).
KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0 + 4 / 128}
#: Ways to hold LoRA adapters.
LORA = ("unified", "slots", "merged", "models")
#: How keys and values go from a pool that computes prompts to one that goes on with them.
KV_SENDS = ("whole", "layerwise")


class EngineWords(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the serving engine: the batching ``policy`` and its limits.

    At most ``max_batch`` requests run at a time, and an iteration computes at most ``budget`` tokens (0: as the policy
    usually does). It looks for new requests once in ``poll`` iterations of decoding, and lets prompts wait for up to
    ``batch_wait`` of them, until they ``fill`` that share of the budget or each attention group has one, and then for
    as many as ``settle`` more. Keys and values of ``kv`` precision lie in blocks of ``block`` tokens: ``kv_blocks`` of
    them, or as many as fit into the share ``memory`` of the device's (0: counted). ``graphs``: iterations of few tokens
    are replayed from CUDA graphs. ``order`` says who of those who wait runs first; with ``prefix_cache`` blocks of a
    common prefix are shared and kept; a ``chunk_cache`` keeps texts wherever they stand in a prompt, and computes that
    share of their tokens again, which is approximate. A request that is evicted is computed again, or swapped
    (``preempt``) to ``host_bytes`` of the host's memory for each rank, where shared blocks that leave the device go
    too. ``kv_budget`` keeps a part of each context alone, which is approximate. Adapters lie in the cache's memory
    (``lora`` unified), in so many ``adapter_slots`` of their own, or are merged into the weights one at a time; built
    from a pool (``adapter_pool``) they take its rank of memory. Or each is a model of its own (``models``) in the
    host's memory, and slots have the ones that ran last. The model ``draft`` (or ``ngram``) guesses so many tokens
    ahead (``guesses``, 0: as the policy of ``speculation`` usually does), each of which comes true with the chance
    ``accept``; ``targets`` copies of the model verify; a draft model without a cache of its own (``draft_cache``) reads
    each sequence anew in each round. ``kv_send`` says whether a prompt's keys and values go to another pool as a whole
    or layer by layer, while later layers are computed. ``profile`` names the engine whose host times are meant.
    Replicas that ``borrow`` keep what they have no room for in the memory of others; those in ``pairs`` hold copies of
    each other's caches. Jobs ``beside`` train on the devices that serve, on the part of them that ``sharing`` gives.
    Replicas that draw from one ``power`` supply are servers of a row. Tuned models may be cut into blocks (``zoo``),
    which lie once for all of them. Replicas may be ``peers``, each with a run of the layers.
    """

    policy: str = "vllm-v1"
    profile: str = "default"
    max_batch: int = 256
    budget: int = 0
    poll: int = 1
    batch_wait: int = 0
    fill: float = 0.0
    settle: int = 0
    block: int = 16
    kv_blocks: int = 0
    kv: str = "bf16"
    memory: float = 0.9
    routing: str = "round-robin"
    graphs: bool = True
    order: str = "fcfs"
    prefix_cache: bool = False
    chunk_cache: float = 0.0
    preempt: str = "recompute"
    host_bytes: float = 0.0
    kv_budget: str = ""
    lora: str = "unified"
    adapter_slots: int = 4
    adapter_pool: int = 0
    draft: str = ""
    speculation: str = "speculative"
    guesses: int = 0
    accept: float = 0.0
    targets: int = 1
    draft_cache: bool = True
    kv_send: str = "whole"
    borrow: bool = False
    pairs: bool = False
    beside: BatchJobs | None = None
    sharing: str = "muxflow"
    power: PowerRow | None = None
    zoo: Zoo | None = None
    peers: PeerChains | None = None

    @property
    def together(self) -> bool:
        """Whether replicas are simulated together: they know of one another, or are not alone on their devices."""
        several = self.beside, self.power, self.zoo
        return self.borrow or self.pairs or any(one is not None for one in several)


#: Key -> (field of :class:`EngineWords` behind ``engine.``; reader of the value; what is wanted).
ENGINE_READERS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "policy": ("engine.policy", policy_name, "a batching policy such as vllm-v1"),
    "engine": ("engine.profile", policy_name, "an engine profile: meshwright catalog"),
    "max_batch": ("engine.max_batch", count(65536), "a positive number of requests up to 65,536"),
    "budget": ("engine.budget", token_budget, "a positive number of tokens of an iteration, or auto"),
    "poll": ("engine.poll", count(65536), "a positive number of iterations up to 65,536"),
    "batch_wait": ("engine.batch_wait", count(65536), "a positive number of iterations up to 65,536"),
    "settle": ("engine.settle", count(65536), "a positive number of iterations up to 65,536"),
    "fill": ("engine.fill", lambda t: positive(t, 1.0), "a share of the token budget above 0 up to 1"),
    "block": ("engine.block", count(4096), "a positive number of tokens of a block up to 4,096"),
    "kv_blocks": ("engine.kv_blocks", num_requests, "a positive number of blocks"),
    "kv": ("engine.kv", one_of(KV_BYTES), f"one of {', '.join(KV_BYTES)}"),
    "memory": ("engine.memory", lambda t: positive(t, 1.0), "a share of the device's memory above 0 up to 1"),
    "routing": ("engine.routing", counted_name, "a routing policy such as round-robin"),
    "graphs": ("engine.graphs", yes_no, "yes or no"),
    "order": ("engine.order", counted_name, "a policy of who is served first, such as fcfs"),
    "prefix_cache": ("engine.prefix_cache", yes_no, "yes or no"),
    "chunk_cache": ("engine.chunk_cache", lambda t: positive(t, 1.0), "the share of a text's tokens computed again"),
    "preempt": ("engine.preempt", one_of(PREEMPTIONS), f"one of {', '.join(PREEMPTIONS)}"),
    "kv_budget": ("engine.kv_budget", numbered_name, "a KV budget, with its number if need be: h2o:0.2, h2o:819t"),
    "lora": ("engine.lora", one_of(LORA), f"one of {', '.join(LORA)}"),
    "adapter_slots": ("engine.adapter_slots", count(65536), "a positive number of adapters that run at a time"),
    "adapter_pool": ("engine.adapter_pool", count(65536), "a positive rank of the pool that adapters are built from"),
    "draft": ("engine.draft", file_name, "a model that guesses next tokens, ngram or mtp"),
    "speculation": ("engine.speculation", policy_name, "a policy of speculation such as speculative"),
    "guesses": ("engine.guesses", count(64), "a positive number of guessed tokens up to 64"),
    "accept": ("engine.accept", lambda t: positive(t, 1.0), "the share of guesses that come true, above 0 up to 1"),
    "targets": ("engine.targets", count(1024), "a positive number of copies of the model that verify"),
    "draft_cache": ("engine.draft_cache", yes_no, "yes or no"),
    "kv_send": ("engine.kv_send", one_of(KV_SENDS), f"one of {', '.join(KV_SENDS)}"),
    "borrow": ("engine.borrow", yes_no, "yes or no"),
    "pairs": ("engine.pairs", yes_no, "yes or no"),
    "beside": ("engine.beside", batch_jobs, "jobs such as bert-large:batch=8:seq=512, with + between them"),
    "sharing": ("engine.sharing", counted_name, "a policy of what a job beside gets, such as muxflow"),
    "power": ("engine.power", power_row, "a policy of a row's power such as polca or polca:budget=0.9:low=0.5"),
    "zoo": ("engine.zoo", zoo, "a number of blocks of a model, and of those that are a tuned one's own: 8:own=2"),
    "peers": ("engine.peers", peer_chains, "latency or throughput, such as latency:layers=12:lost=2@30s"),
    "host": ("engine.host_bytes", parse_bytes, "memory of the host for each rank, such as 64GiB"),
}
