"""The campaign of the serving engine: requests come, are cancelled, preempted and swapped in any order, and engines die
under them.

A stub computes in place of a model: it keeps the token of every slot of every block, and what follows a text is a
digest of the text *as it is read back from the blocks*. A block that two requests were given, a copy that was left out
or a prefix that is shared and should not be changes an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from fuzz.readers import Defect

if TYPE_CHECKING:
    from meshwright.endpoint.seam import Prompted, ServingEngine

VOCAB = 23
POLICIES = ("static", "orca", "vllm-v0", "vllm-v1", "sarathi", "past-future", "flover")
ORDERS = ("fcfs", "priority", "sjf", "deadline", "vtc", "lpm", "dlpm:20", "batchllm", "dynasor")
#: Steps without an answer after which an engine hangs.
HANGS = 2_000


def _again(one: Prompted, tokens: list[int]) -> Prompted:
    """Return what is left of a request, for another engine."""
    prompt, done = (*one.prompt, *tokens), len(tokens)
    return msgspec.structs.replace(one, prompt=prompt, limit=one.limit - done, answered=done)


class Interleavings:
    """Engines under random events; an example is the engine's words and the events."""

    target, chunk = 1_000, 200

    def example(self, rng: Random) -> dict[str, Any]:
        block, prefix = rng.choice((1, 2, 4)), rng.random() < 0.6
        adapters = rng.choice((0, 0, 0, 1, 2))
        policy = rng.choice(POLICIES)
        said = {
            "policy": policy,
            "order": rng.choice(ORDERS) if rng.random() < 0.5 else "fcfs",
            "block": block,
            "blocks": rng.choice((9, 10, 12, 24)) * 4 // block + 2 * adapters,
            "max_batch": rng.choice((1, 2, 5, 16)),
            "budget": rng.choice((1, 4, 9, 64)),
            "prefix": prefix,
            "unit": block * rng.choice((1, 1, 2)),
            "swap": rng.random() < 0.4,
            "host": rng.choice((0, 3, 20, 200)),
            "guesses": rng.choice((0, 0, 2, 4)) if policy in ("vllm-v0", "vllm-v1", "sarathi", "past-future") else 0,
            "adapters": adapters if policy != "static" else 0,
        }
        if rng.random() < 0.4:  # prompts are computed in one half, answers generated in another
            said |= {"beyond": rng.choice((9, 12, 24)) * 4 // block + 2 * adapters, "late": rng.choice((0, 1, 4))}
        events, stems = [], [[rng.randrange(6, VOCAB) for _ in range(12)] for _ in range(2)]
        for _ in range(rng.randint(1, 40)):
            kind = rng.random()
            if kind < 0.45:
                stem = rng.choice(stems)[: rng.randint(0, 12)]
                prompt = [*stem, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8)))]
                adapter = rng.randrange(3) if said["adapters"] and rng.random() < 0.7 else -1
                events.append(["ask", prompt, rng.randint(1, 15), adapter, rng.randrange(3), rng.randrange(3)])
            elif kind < 0.55:
                events.append(["cancel", rng.randrange(20)])
            elif kind < 0.58:
                events.append(["die"])
            else:
                some = ("step", "beyond") if "beyond" in said else ("step",)
                events += [[rng.choice(some)] for _ in range(rng.randint(1, 6))]
        return {"words": said, "events": events}

    def look(self, example: dict[str, Any]) -> str:
        from tests.run.stub_engine import counted, empty, engine_of, expected  # torch is for this campaign alone
        from tests.run.stub_halves import both_counted, both_empty, halves_of

        from meshwright.endpoint.seam import Prompted, Sampling

        asked: dict[int, Prompted] = {}
        made: dict[int, tuple[list[int], str]] = {}
        divided, number, preempted = "beyond" in example["words"], -1, 0
        build = halves_of if divided else lambda words: (engine_of(words),)
        if divided:
            counted, empty = both_counted, both_empty
        engine, *second = halves = build(example["words"])
        names = engine.facts.adapters
        for kind, *rest in example["events"]:
            if kind == "ask":
                prompt, limit, adapter, tenant, priority = rest
                number += 1
                asked[number] = Prompted(
                    number=number,
                    prompt=tuple(prompt),
                    limit=limit,
                    sampling=Sampling(temperature=0.0),
                    adapter=names[adapter] if adapter >= 0 else "",
                    tenant=tenant,
                    priority=priority,
                )
                engine.submit(asked[number])
            elif kind == "die":  # another engine goes on with what is not answered, as a front has it
                preempted += engine.figures().preempted
                engine, *second = halves = build(example["words"])
                for one in asked.values():
                    tokens, finish = made.get(one.number, ([], ""))
                    if not finish:
                        engine.submit(_again(one, tokens))
            elif kind == "cancel":
                engine.cancel(rest[0])
                if rest[0] in asked and not made.get(rest[0], ([], ""))[1]:
                    del asked[rest[0]]
            elif kind == "beyond":
                second[0].turn(0.0)
            else:
                self._step(engine, made, asked)
            counted(*halves)
        steps = 0
        while not engine.idle:
            self._step(engine, made, asked)
            counted(*halves)
            steps += 1
            if steps > HANGS:
                raise Defect("the engine does not come to an end")
        for number, one in asked.items():
            tokens, finish = made.get(number, ([], ""))
            if finish == "error" or tokens != expected(list(one.prompt), one.limit):
                raise Defect(f"an answer is {finish or 'another'}")
        empty(*halves)
        return "preempted" if preempted + engine.figures().preempted else "served"

    def _step(self, engine: ServingEngine, made: dict[int, tuple[list[int], str]], asked: dict[int, Any]) -> None:
        for piece in engine.step():
            tokens, finish = made.setdefault(piece.number, ([], ""))
            if finish or (piece.number not in asked):
                raise Defect("an answer goes on behind its end")
            made[piece.number] = ([*tokens, *piece.tokens], piece.finish)

    def smaller(self, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        events = example["events"]
        for size in (len(events) // 2, 4, 1):
            for at in range(0, len(events), max(size, 1)):
                yield example | {"events": events[:at] + events[at + max(size, 1) :]}
        for key, value in (("order", "fcfs"), ("swap", False), ("host", 0), ("guesses", 0), ("prefix", False)):
            if example["words"][key] != value:
                yield example | {"words": example["words"] | {key: value}}


class Deaths(Interleavings):
    """Engines that die at least once among their events, while some are answered."""

    def example(self, rng: Random) -> dict[str, Any]:
        made = super().example(rng)
        asks = [at for at, event in enumerate(made["events"]) if event[0] == "ask"]
        if not asks:
            made["events"].insert(0, ["ask", [rng.randrange(6, VOCAB) for _ in range(8)], 15, -1, 0, 0])
        begin = asks[0] + 1 if asks else 1
        made["events"].insert(rng.randint(begin, len(made["events"])), ["die"])
        return made
