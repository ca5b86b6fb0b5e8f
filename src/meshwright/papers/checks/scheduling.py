"""Schedulers of a serving engine: how many requests they serve within bounds, side by side."""

from __future__ import annotations

from math import exp, log, sqrt

from meshwright.answer.serving import predict_serving
from meshwright.answer.serving_answer import ServingMetrics, ServingPrediction
from meshwright.papers.evaluate import served_metrics
from meshwright.papers.outcome import AT_LEAST, AT_MOST, SHOWN, WITHIN, Check, Figure, Outcome
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.serve import parse as parse_serve

#: Quantile of a normal distribution at 90%.
Z90 = 1.2816
#: (median, 90th percentile) of prompts and answers of Sarathi-Serve's table 2, and the longest sequence kept.
OPENCHAT = ((1730, 5696), (415, 834), 8192)
ARXIV = ((7059, 12985), (208, 371), 16384)
#: Its bounds on the 99th percentile of the time between tokens for Mistral-7B (table 3), and the budget under each.
STRICT, RELAXED = (0.1, 512), (0.5, 2048)
#: Its bound on the median of the time before a request is scheduled, and the requests of a trial of its search.
MOST_DELAY, SEARCHED = 2.0, 2048


class AskedPlan:
    """A model on a cluster that serves requests in the words of a workload; prices are found once."""

    def __init__(self, model: str, on: str, plan: str):
        self.model, self.cluster, self.plan = load_model(model), load_cluster(on), parse_plan(plan)
        self.tables: dict = {}

    def answer(self, words: str) -> ServingPrediction:
        """The answer for a workload, without intervals."""
        serve = parse_serve(words)
        return predict_serving(self.model, self.cluster, serve, self.plan, detail=False, tables=self.tables)

    def metrics(self, words: str) -> ServingMetrics:
        """The metrics of a workload.

        Raises:
            MeshwrightError: J008 where the weights leave no room for a request.
        """
        return served_metrics(self.answer(words))

    def capacity(self, words: str, longest_gap: float) -> float:
        """The most requests a second, to 3%, of which the median is scheduled in time and 99% of the gaps between
        tokens are no longer."""

        def kept(rate: float) -> bool:
            found = self.metrics(f"rate={rate:.5f},requests={SEARCHED},{words}")
            return found.itl_s.p99 <= longest_gap and found.queue_s.p50 <= MOST_DELAY

        low, high = 0.02, 8.0
        while high > 1.03 * low:
            middle = sqrt(low * high)
            low, high = (middle, high) if kept(middle) else (low, middle)
        return low


def _lognormal(median: float, p90: float) -> str:
    sigma = log(p90 / median) / Z90
    return f"lognormal:mean={median * exp(sigma**2 / 2):.0f};sigma={sigma:.3f}"


def sarathi() -> Outcome:
    """Capacity of Mistral-7B on an A100 under strict and relaxed bounds, chunked and not."""
    asked = AskedPlan("mistral-7b", "1xa100_80gb_pcie", "tp1")
    figures, best = [], 0.0
    for name, (prompt, output, longest) in (("openchat_sharegpt4", OPENCHAT), ("arxiv_summarization", ARXIV)):
        lengths = f"prompt={_lognormal(*prompt)},output={_lognormal(*output)},longest={longest},engine=vllm-2023-12"
        for bound, (gap, budget) in (("strict", STRICT), ("relaxed", RELAXED)):
            chunked = asked.capacity(f"{lengths},policy=sarathi,max_batch=128,budget={budget}", gap)
            whole = asked.capacity(f"{lengths},policy=vllm-v0,max_batch=128,budget={longest}", gap)
            joined = asked.capacity(f"{lengths},policy=orca,max_batch=16", gap)
            figures.append(Figure(f"capacity over vLLM, {name}, {bound}", None, chunked / whole, "x", SHOWN))
            figures.append(Figure(f"capacity over Orca, {name}, {bound}", None, chunked / joined, "x", SHOWN))
            best = max(best, chunked / max(whole, joined))
    why = "one engine's kernels and host here, of the default profile: a chunk's overhead is that of its kernels alone"
    head = Figure("most capacity over Orca and vLLM", 2.6, best, "x", WITHIN, 0.1, headline=True, why=why)
    return Outcome(
        figures=(head, *figures),
        baseline="vLLM V0 (batches of 128) and Orca (of 16) on the same device, with the same costs",
        assumptions=(
            "lengths log-normal by the median and 90th percentile of the paper's table 2; device, batches, budgets and "
            "trials of 2,048 requests as in osdi-experiments/figure-5-6 of its code",
            "all three schedulers on the code of vLLM that it began from, for which that of December 2023 stands",
        ),
    )


#: Requests of long answers, as many open as the cache cannot hold at their ends, and the paper's bounds.
HEAVY = "concurrency=150,ramp=30s,requests=600,prompt=lognormal:mean=600;sigma=0.9,output=lognormal:mean=1500;sigma=0.5"


def past_future() -> Outcome:
    """Goodput under heavy load against admission that reserves and admission by what is free now."""
    asked = AskedPlan("llama2-7b", "1xa100", "tp1")
    words = f"{HEAVY},longest=4000,max_batch=256,ttft=10s,tpot=100ms"
    past, reserved, free = (
        asked.metrics(f"{words},policy={policy}").goodput_req_per_s for policy in ("past-future", "orca", "vllm-v1")
    )
    why = "an eviction costs the computing of a prompt alone here, and no objective bounds the longest gap it leaves"
    return Outcome(
        figures=(
            Figure("goodput over conservative admission", 2.0, past / reserved, "x", AT_LEAST, headline=True),
            Figure("goodput over aggressive admission", 2.0, past / free, "x", AT_LEAST, headline=True, why=why),
        ),
        baseline="the longest answer reserved (Orca) and admission by free blocks (vLLM V1), same device and costs",
        assumptions=("long answers, 150 requests open; first tokens within 10 s, tokens within 100 ms on average",),
    )


def batchllm() -> Outcome:
    """Throughput of whole batches whose prompts share prefixes that the cache cannot hold all."""
    asked = AskedPlan("llama2-7b", "1xa100", "tp1")
    figures = []
    for count, groups, prefix in ((1500, 300, 2048), (2000, 600, 1024)):
        lengths = f"prompt={prefix + 256},prefix={prefix}:groups={groups},output=lognormal:mean=100;sigma=0.6"
        words = f"batch={count},{lengths},longest=4096,prefix_cache=yes"
        grouped, usual = (
            asked.metrics(f"{words},order={order}").throughput_req_per_s for order in ("batchllm", "fcfs")
        )
        what = f"{count:,} requests, {groups:,} prefixes of {prefix:,} tokens: throughput over vLLM's prefix cache"
        figures.append(Figure(what, 1.1, grouped / usual, "x", AT_LEAST, headline=True))
        figures.append(Figure(f"{what}, no more than its most", 2.0, grouped / usual, "x", AT_MOST, 1.0, headline=True))
    return Outcome(
        figures=tuple(figures),
        baseline="vLLM V1 with its prefix cache, requests in order of arrival, on the same device",
        assumptions=("1.1x is the least of the paper's microbenchmarks, 2x the most; its fused kernel is not counted",),
        missing=("its two industry workloads, which are not public: these are of prefixes that a cache cannot hold",),
    )


def dlpm() -> Outcome:
    """Throughput against a virtual token counter where tenants ask behind long prefixes, one device and several."""
    one, several = AskedPlan("llama3.1-8b", "1xa10g", "tp1"), AskedPlan("llama3.1-8b", "4xa10g", "dp4")
    figures, best = [], 0.0
    for tenants, groups, prefix in ((4, 16, 4096), (40, 40, 4096), (20, 100, 2048)):
        words = f"rate=20,requests=600,tenants={tenants},prompt={prefix + 100},prefix={prefix}:groups={groups}"
        words += ",output=32,prefix_cache=yes,max_batch=64"
        ours, fair = (one.metrics(f"{words},order={order}").throughput_req_per_s for order in ("dlpm", "vtc"))
        figures.append(Figure(f"throughput over VTC, {groups} prefixes of {prefix:,}", None, ours / fair, "x", SHOWN))
        best = max(best, ours / fair)
    words = "rate=20,requests=1200,tenants=20:zipf=1,prompt=2148,prefix=2048:groups=40,output=64,prefix_cache=yes"
    words += ",max_batch=64"
    local, loaded = (
        several.metrics(f"{words},{how}").e2e_s.mean
        for how in ("routing=d2lpm,order=dlpm", "routing=least-loaded,order=lpm")
    )
    why = "prefixes here are long and many, so that an order that ignores them computes nearly all of them again"
    return Outcome(
        figures=(
            Figure("most throughput over VTC", 2.87, best, "x", WITHIN, 0.1, headline=True, why=why),
            *figures,
            Figure("latency of requests over four replicas by load", None, loaded / local, "x", SHOWN),
        ),
        baseline="a virtual token counter on the same engine with the same prefix cache; requests by load, then LPM",
        assumptions=("prefixes are drawn independently of tenants", "a quantum of 8,192 tokens"),
    )


def flover() -> Outcome:
    """Requests at random times: fused into one generation loop, or one at a time and in batches by turn."""
    figures = []
    for model, paper in (("gpt-j-6b", 11.0), ("llama2-7b", 16.0)):
        asked = AskedPlan(model, "1xa100", "tp1")
        words = "rate=10,requests=100,prompt=64,output=512"
        fused, alone, batched = (
            asked.metrics(f"{words},policy={how}").throughput_req_per_s
            for how in ("flover,max_batch=64", "static,max_batch=1", "static,max_batch=8")
        )
        one, eight = (f"{model}, throughput over {what}" for what in ("one request at a time", "static batches of 8"))
        figures.append(Figure(one, paper, fused / alone, "x", AT_LEAST, 1.0, headline=True))
        figures.append(Figure(eight, paper, fused / batched, "x", AT_MOST, 1.0, headline=True))
    return Outcome(
        figures=tuple(figures),
        baseline="static batching (FasterTransformer) on the same device with the same costs",
        assumptions=(
            "ten requests a second of 64 + 512 tokens; how many the paper's baseline takes at a time is not known: its "
            "figure has to lie between none and eight",
        ),
        missing=("how many requests the baseline of its figures takes at a time",),
    )


#: A query's samples, the seconds in which such queries come, and those in which nine of ten have to be settled.
QUERIES = "prompt=256,output=lognormal:mean=300;sigma=0.5,samples=10,prefix_cache=yes,max_batch=256"
COMING, SETTLED = 60, 20.0


def dynasor() -> Outcome:
    """Compute of a batch of queries, and queries a second that are settled in time, where half of the samples do."""
    asked = AskedPlan("llama3.1-8b", "1xa100", "tp1")
    early = ",certain=0.5,order=dynasor"

    def spent(words: str) -> float:
        causes = asked.answer(f"batch=1000,{QUERIES}{words}").attribution
        return sum(seconds for cause, seconds in causes.items() if cause != "idle")

    def most(words: str) -> float:
        low, high = 10.0, 80.0
        while high > 1.05 * low:
            rate = sqrt(low * high)
            found = asked.answer(f"rate={rate:.4f},requests={round(rate * COMING)},{QUERIES}{words}")
            low, high = (rate, high) if found.query_s.p90 <= SETTLED else (low, rate)
        return low

    saved, more = 1.0 - spent(early) / spent(""), most(early) / most("")
    why = "samples that become needless have run for as long as the shorter ones took, which is lost"
    other = "the baseline's other policies, by which its queries wait longer, are not in the comparison"
    return Outcome(
        figures=(
            Figure("compute saved in a batch", 0.5, saved, "", WITHIN, 0.1, headline=True, why=why),
            Figure("queries a second settled in time", 3.3, more, "x", WITHIN, 0.1, headline=True, why=other),
        ),
        baseline="all samples of every query, first come, first served, on the same engine",
        assumptions=("half of the 10 samples settle an answer; nine of ten queries within 20 s",),
    )


CHECKS: dict[str, Check] = {
    "sarathi": sarathi,
    "past_future": past_future,
    "batchllm": batchllm,
    "dlpm": dlpm,
    "flover": flover,
    "dynasor": dynasor,
}
