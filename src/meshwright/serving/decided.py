"""The decider that an engine's words ask for: one policy for both executors, the simulator's and the real engine's."""

from __future__ import annotations

from meshwright import serving
from meshwright.errors import MeshwrightError
from meshwright.serving.adapters import AdapterRules
from meshwright.serving.batching import Batching, DraftPolicy
from meshwright.serving.cache import CacheRules, EngineLimits
from meshwright.serving.kv_budget import KvShares, number_of
from meshwright.spec.engine_words import EngineWords


def budget_shares(said: str, width: int) -> KvShares:
    """Return the shares of a KV budget such as ``h2o:0.2`` or ``h2o:819t`` of a model whose keys of a token are `width`
    numbers.

    Raises:
        MeshwrightError: W013 when there is none of that name, W002 for tokens where it wants a share.
    """
    name, _, number = said.partition(":")
    budget = serving.get("kv_budget", name)
    if number.endswith("t") and not budget.counts:
        message, help = f"the number of {name} is {budget.wanted}, and {number} are tokens", "say a number from 0 to 1"
        raise MeshwrightError.one("W002", message, place=f"--serve kv_budget={said}", help=help)
    return budget.shares(number_of(number) if number else budget.usual, width)


def limits_of(
    words: EngineWords, blocks: int, *, budget: int = 0, groups: int = 1, device_share: float = 1.0
) -> EngineLimits:
    """Return the limits of an engine of so many cache blocks. The token budget is the one given, else that of the
    words, else the policy's for each of its `groups` of ranks, as each has a scheduler of its own."""
    usual = serving.get("batching", words.policy).budget * groups
    return EngineLimits(
        max_batch=words.max_batch,
        budget=budget or words.budget or usual,
        block=words.block,
        blocks=blocks,
        device_share=device_share,
        poll=words.poll,
        batch_wait=words.batch_wait,
        fill=words.fill,
        settle=words.settle,
        groups=groups,
    )


def rules_of(words: EngineWords, *, unit: int, block_bytes: float, adapters: AdapterRules | None = None) -> CacheRules:
    """Return the rules of a cache whose names stand for `unit` tokens: the host has room for as many blocks of so many
    bytes as there are in the memory that was said, on each rank."""
    shares = words.prefix_cache or words.chunk_cache > 0
    return CacheRules(
        prefix=words.prefix_cache,
        unit=unit if shares else CacheRules().unit,
        swap=words.preempt == "swap",
        host_blocks=int(words.host_bytes / block_bytes) if block_bytes else 0,
        adapters=adapters,
        chunks=words.chunk_cache,
        borrow=words.borrow,
    )


def decider_of(
    words: EngineWords,
    limits: EngineLimits,
    rules: CacheRules,
    *,
    drafts: DraftPolicy | None = None,
    parks: bool = False,
    together: bool = True,
) -> Batching:
    """Return the decider of an engine with these limits and rules."""
    return Batching(
        policy=serving.get("batching", words.policy),
        limits=limits,
        order=serving.get("order", words.order),
        rules=rules,
        drafts=drafts,
        parks=parks,
        together=together,
    )
