"""The draft model of a replica: its costs, its memory, and the guesses that the simulator draws."""

from __future__ import annotations

import msgspec

from meshwright import serving
from meshwright.cost import Costs
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan
from meshwright.serving.speculative import Drafts
from meshwright.simulate.guessing import Guesses
from meshwright.simulate.iterations import priced
from meshwright.spec import model as models
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.serve import EngineWords

#: Guesses where a draft model comes from the prompt itself.
NGRAM = "ngram"
#: Guesses where the model's own head for tokens further ahead makes them.
HEAD = "mtp"
#: Guesses that a policy asks for where nobody says how many; more where the draft model never waits.
USUAL, ENDLESS = 4, 16


class DraftPart(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model's part of a replica: its guesses, and the bytes of its weights and of a cached token on a rank
    that has it."""

    drafts: Drafts
    guesses: Guesses
    weight_bytes: float = 0.0
    token_bytes: float = 0.0


def draft_layout(model: Model, tp: int) -> int:
    """Return over how many of the `tp` ranks a draft model is split: as many as divide its heads."""
    heads = [(spec.heads, spec.kv_heads) for spec in model.attentions]
    return next(t for t in range(tp, 0, -1) if tp % t == 0 and all(h % t == 0 and k % t == 0 for h, k in heads))


def prediction_head(model: Model) -> Model:
    """Return a model's head for tokens further ahead as a draft model: one more layer of its last kind between its own
    table and head (DeepSeek-V3, 2412.19437, section 2.2)."""
    return msgspec.structs.replace(model, blocks=(model.blocks[model.pattern[-1]],), pattern=(0,))


def draft_part(
    words: EngineWords, model: Model, plan: Plan, cluster: Cluster, costs: Costs, most: dict[str, int], cache_s: float
) -> DraftPart | None:
    """Return the draft model's part of a replica of a `model` under `plan`; None without one. Its iterations have at
    `most` so many tokens, requests (batch) and tokens of context; `cache_s` are the seconds in which the cache of a
    token is moved within the device.

    Raises:
        MeshwrightError: M001 for a draft model that is none.
    """
    if not words.draft:
        return None
    policy = serving.get("speculation", words.speculation)
    count = words.guesses or (ENDLESS if policy.endless else USUAL)
    targets = plan.layout.pp if policy.name == "pipeinfer" else words.targets
    guesses = Guesses(
        policy=policy, accept=words.accept, targets=targets, realign_s=cache_s, forgets=not words.draft_cache
    )
    if words.draft == NGRAM:
        return DraftPart(drafts=Drafts(count=count, even=policy.even), guesses=guesses)
    if words.draft == HEAD:
        draft, own = (
            prediction_head(model),
            msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, pp=1)),
        )
    else:
        draft = models.load(words.draft)
        own = Plan(layout=Layout(tp=draft_layout(draft, plan.layout.tp), dp=1), precision=plan.precision)
    forward = Forward(draft, own, Mesh(own, cluster), words.kv)
    table = priced(forward, cluster.islands[0].device, costs, **most)
    return DraftPart(
        drafts=Drafts(count=count, even=policy.even),
        guesses=msgspec.structs.replace(guesses, draft=table),
        weight_bytes=_head_bytes(forward) if words.draft == HEAD else forward.weight_bytes(0),
        token_bytes=forward.kv_bytes(0) * words.draft_cache,
    )


def _head_bytes(forward: Forward) -> float:
    """Return the bytes of a head for tokens further ahead: its layer, and the projection that joins a hidden state with
    the next token's embedding, on every rank; tables are those of the model."""
    return sum(forward.block_bytes(0)) + 2.0 * forward.model.hidden**2 * 2.0
