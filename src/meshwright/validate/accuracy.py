"""The book's page on accuracy, written from a validation run and from what the catalog says of its own constants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np

from meshwright.atomic import write_bytes
from meshwright.cost import frameworks
from meshwright.cost.bound import SHAPES
from meshwright.cost.carried import ROOFLINE, Spreads, width
from meshwright.cost.fabric import shipped
from meshwright.cost.fitted import profiles
from meshwright.validate import text
from meshwright.validate.aims import NAMES, reached
from meshwright.validate.faults import FAULTS
from meshwright.validate.run import UNKNOWN, Table
from meshwright.validate.score import Scored, metrics
from meshwright.version import VERSION

#: Framework constant -> unit and meaning, as ``Framework`` documents them.
FRAMEWORK = {
    "elementwise_passes": ("times", "bytes its memory-bound kernels move over what fused ones need"),
    "host_us_per_kernel": ("us", "CPU time to issue one kernel"),
    "host_us_per_collective": ("us", "CPU time to issue one collective"),
    "host_us_per_pass": ("us", "CPU time per microbatch and pass over a stage that nothing hides"),
    "host_us_per_step": ("us", "CPU time of a step outside of its passes that nothing hides"),
    "ring_steps": ("times", "a ring's step between nodes beside training over one on idle nodes"),
    "host_us_per_dispatch": ("us", "a device waits for the host to read how many tokens each expert got"),
    "exchange_share": (
        "fraction",
        "of the bandwidth between nodes that the exchange reaches which ZeRO-3 does layer by layer",
    ),
    "gather_share": (
        "fraction",
        "of the bandwidth between nodes that the gather of all parameters after an update reaches",
    ),
    "activation_copies": ("times", "bytes its kernels keep for the backward over what fused ones keep"),
    "allocator_slack": ("fraction", "reserved over allocated bytes that fragmentation leaves unused"),
    "ahead_layers": (
        "layers",
        "by which the host is ahead: it has freed their collectives' tensors, and the device has yet to use them",
    ),
}
#: An honest 80% interval covers this share of rows.
COVERAGE = (0.70, 0.90)
ENOUGH = 30
HEAD = """# Accuracy

How far predictions are from measurements, on every row of the tables that a folder of measurements holds. Written by
`meshwright validate --data DIR --left-out --markdown docs/accuracy.md`; the code is version {version}. Only the scorer
reads what was measured, but for the fits that `--left-out` makes of the rows that stay.

Accuracy is what is **left out**: of steps the shape of a model (whatever its name), the device, the source or the
software, of kernels the device. Figures in sample stand beside. Devices and networks were calibrated on the tables of
kernels and collectives, so those tables below are in sample unless their name says `left_out`
([constants of kernels](#constants-of-kernels)); profiles of frameworks say in their source to how many steps they were
fitted ([constants of frameworks](#constants-of-frameworks)).
"""
#: How steps are left out, and what is aimed at without the software.
HOW_LEFT = """Steps of the table, each source weighing the same, without continuous-integration models. The rows that
stay tell the constants of their software; rows of its other versions, and other stacks, how far those lie from theirs.
Software without a row that stays is answered as if it were unknown: by the middle of the other stacks that its
precision, year and words leave; a profile that no step was fitted to as it is. Aims without the software: mean error at
most 16%, bias within 5%, 75 to 85% in the interval, high over low at most 1.7.
"""
#: Choices that were made looking at the rows and are not made again in the folds.
DECLARED = """Chosen once, looking at the rows, and not again in each fold:

- which profile a row of a known framework belongs to: versions of Megatron-LM by sequence parallelism, selective
  recompute or ZeRO, those of Megatron-Bridge by release, nanotron's two by the steps of the job's own rings (45 us);
- words of profiles that say what software does (overlap, loss kernels, DeepEP from 32 ranks of experts on, CUDA graphs
  of layers without experts: Megatron-Bridge's guide advises them, and that these jobs had them was seen in steps of
  LoRA on 64 devices and more, which would take longer to issue kernel by kernel than they took);
- mechanisms that were looked for where rows were off, and are priced as their code or measurements elsewhere say:
  backwards of scans, Mamba-2's second convolution, activations with the sequence first, transposes of operands in 8
  bits, tokens sorted by one kernel, the GB300's products (Megatron-Bridge with shapes left out from 16.2% to 13.2%),
  and shapes that Megatron-LM's fused softmax does not take; in serving the indexer of sparse attention, both
  down-projections of latent attention as one product, and caches of 8 bits in FlashAttention 3 (GLM-5's tokens from
  23% to 12%, those of Llama-3.1-70B under vLLM on H100 from 15% to 9%); which attention group of TensorRT-LLM a prompt
  belongs to and waits in, as its code has it: seen in first tokens of DeepSeek with attention groups (37 servers from
  57% to 28%); those of gpt-oss (10) were off alike, and came from 59% to 20% by it with what its launch script says,
  which was read then; how TensorRT-LLM admits requests and sizes its cache, and that an iteration takes as long as that
  of its attention group with most: looked for where servers with a full cache, and tokens with groups, were off; that
  kernels of sparse latent attention on Hopper compute 64 heads at least, as their code has it: read where servers of
  such models were looked at; how many predicted tokens come true, as its authors published it, and how many tokens an
  iteration had in early scripts, where servers of one image each were off (tokens 18%, now 13%; first tokens 45%, now
  34%);
- for unknown software that stacks which evidence does not fit weigh a tenth, that products in fp16 are of the time
  before FlashAttention, that those of 8 bits are of fused or compiled kernels (with software left out Megatron-Bridge's
  rows came from 25% to 20% by it, MLPerf's from 23% to 20%), and that FlashAttention is in every stack of 2022.9 and
  later;
- the spread of the default's steps (0.145; 0.175 before, under which 87% were in the interval), which was set by the
  coverage above (79%; 77 to 82% where one source is left out), so that coverage and high over low of unknown software
  are in part fitted; the cap of 10 ms on a step's own host time; which profiles do not vote for the middle;
- how far apart devices, precisions and the roofline are for curves that are carried, the power by which these weigh,
  how alike distances are for their spread, and the powers below which vector units (P4, T4, L4) and matrix units (L40S,
  RTX PRO 6000, its figure such that the A100 comes out right) clock lower, by leaving out the same devices that
  `left_out` tables leave out;
- the share of the network that gathers after an update reach (0.18 under nanotron), fitted on pairs of its plans;
- of what a row does not say: that fits are judged by the reading that keeps least (full recompute; of unknown software
  state in 16 bits, and `selective` by operators), that fp16 without a date is of unfused attention under any name, and
  that a microbatch is as many rows as the fused softmax of a stack takes, where the batch divides so;
- the usual size of fits' errors (7%) and their correlation within a shape (0.2), which weigh a stack's steps against
  what other stacks say: an analysis of variance of the residuals of fitted profiles. A correlation of 0.5 and another
  form of the spread over stacks were looked at before, on left-out figures too;
- profiles as they are shipped were fitted while other stacks held their constants by next to nothing: what is left out
  is predicted by what `meshwright calibrate` makes of the rows that stay, in sample by the shipped constants. Shipping
  what it makes of all rows of five stacks was tried and undone: host times of one stack, told by nine steps on AMD
  devices, moved the middle of all stacks, and unknown software from 15% to 19% mean error;
- how far own runs may move a ring's steps: as far as a constant of which no other stack tells (a standard deviation of
  1.2). A narrow prior (0.3) left rows under nanotron 50% off where five of them were given, and 24% where none was;
- that own runs may tell of the first FlashAttention: seen in rows of LLM Foundry, whose others are 12.0% off with five
  given without it and 9.3% with it, over 24 draws made after it was chosen (three draws of this table are too few to
  tell). Exchanges in slices, and the shares of the network under ZeRO, were tried on three draws and undone: on
  eight others nanotron's fast rows went from 15.8% to 19.9%;
- that own runs may tell of CUDA graphs under operands of 8 bits, of tokens sorted in one kernel and of experts'
  exchanges beside compute between nodes: by what each word does to rows of unknown software. Over eight draws
  nanotron's fast rows went from 18.2% to 18.8% where graphs were open under 16 bits too, which was undone;
- that they may tell of experts' exchanges beside compute inside a domain too, and of those of tensor parallelism: by
  what constants leave where all rows of a stack are given (22% of Megatron-Bridge 26.06 and of nanotron's slow rows;
  10% and 13% with the word). Over twelve draws made after that Megatron-Bridge 26.06 came from 24.4% to 14.2% and
  nanotron's slow rows, whose products are sliced, from 35.4% to 24.0%; its fast rows, whose are not, went from 16.6% to
  17.8% (over eight others 34.3% to 30.6%, and 18.2% to 19.6%); other stacks moved by 0.3 points or less;
- of what was looked at for own runs and not kept: a mean over kinds of stacks by their evidence in place of the
  likeliest one (over twelve draws nanotron's fast rows 18.6% to 14.7%, its slow rows 28.4% to 30.2%, five others 0.5
  points or less; a profile is one stack), evidence at each kind's own mode (18.0% and 29.4%), errors that constants
  cannot say of 15% or 20% in place of 10%, and no kind whose steps were launches alone (both within 0.7 points);
  nor to carry what is left of the given runs to other layouts by a Gaussian process, its kernel learned on the other
  sources: of some twenty forms the best took ten stacks from 15.7% to 14.9%, some became worse, and its own intervals
  of 80% held 66% of the rows;
- the ends of what is believable, and the constants of memory, which are fitted by model;
- of memory, that Megatron-Core's steps have the dropout of its command line, that workspaces of products count as
  tensors, and that a step of one microbatch has half of the layers' tensors in flight: looked for where peaks were off
  (Megatron-Core's from 10.0% to 8.5%, nanotron's from 8.4% to 7.9%), with sizes from the code of torch, Transformer
  Engine and Megatron-LM;
- of served rows: that engines run the faster of two kernels for experts' products in four bits, which rows of the B200
  and the H100 speak for; that the workers of each stage of DistServe's engine take the host's times, which its runs
  with a pipeline of two do, and which of its launch script's settings count: of two versions the one whose room for
  prompts leaves vLLM the cache that its saturated runs fill, while DistServe's runs fill the caches of its own count;
  that a configuration's link is what rings take; and what TensorRT-LLM's kernels and prompts take over those of the
  tables (0.88 and 1.03, of six pairs on 197 servers of whom it is known whether they predict several tokens at once);
  how uneven routers are (0.7, of five values on 171 servers of seven mixtures, models and engines left out, without
  five groups of servers that were off by more than twice as much as others); and how much longer prompts of other
  engines take than TensorRT-LLM's kernels (1.25, between two values on 81 servers on B200; a run on RTX PRO 6000 that
  was not looked at has its first tokens 1% off where they were 17%).
  Of what was looked at for these rows and not kept: vLLM with piecewise CUDA graphs, with prompts as fast as the
  tables, and refitted; block-scaled products for models stored so; DistServe's engine that stands still while a cache
  is fetched; residuals, casts and rotations fused into other kernels, shared experts beside routed ones (models left
  out no better, or worse); and other paces of kernels after what is above."""
DEFINITIONS = """## What the figures mean

Errors are |predicted / measured - 1|; bias is the mean of predicted / measured - 1. *Trivial* is the mean error of
`6 N D / (devices * peak * 0.5) * bubble` on the same rows (8 N D where all is recomputed, 4 N D over a frozen base),
*roofline* the median error of peak arithmetic or full bandwidth, whichever takes longer. A *group* is rows of one
source, hardware, framework, model, phase, precision, device count, sequence length and global batch, with five timed
rows or more; *rank* is Spearman's correlation in a group and *regret* the measured time of the row predicted fastest
over the best measured, minus 1, both averaged over groups.
Memory is compared with the kind a row states, allocated or reserved; other kinds are not scored. *accuracy* is the
share of rows whose fitting or not was told right, *recall* that of rows out of memory that were told so.
"""
GAPS = """- Times of `megatron_goldens` are those of continuous-integration models of 12 layers and width 512, whose
  steps are launches alone and run with checks that training leaves off. The profile of their framework is fitted to
  them; unknown software is not.
- Of the steps over several nodes in `vtrain_multi`, those with tp2 and tp4, where a node holds several replicas, took
  longer than those of the same work with tp8 or tp1. The excess follows neither the microbatch, the pipeline's depth,
  the bytes exchanged nor memory, and the same layouts within one node (`vtrain_single`) show none of it, so nothing was
  added for it. The source's rank correlation and regret are what it costs.
- An input that a row does not record (recompute, attention kernel) widens its interval by all it could have been, so
  sources that leave much open are covered more often than 80%.
- Memory readings of `nvidia-smi` (kind `unknown`) hold more than a process's tensors and are not scored.
"""


def write(found: list[Table], path: str | Path) -> None:
    """Write the page of a validation to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(found).encode())


def render(found: list[Table]) -> str:
    """The page as Markdown."""
    steps = next((table for table in found if table.name == "training_steps"), None)
    parts = [HEAD.format(version=VERSION)]
    if steps is not None:
        parts += [_aims(steps, next((t for t in found if t.name == "training_steps_shape_left_out"), None))]
    parts += [_left_out(found), _choices(found), DEFINITIONS, *(_figures(table) for table in found), _faults(found)]
    if steps is not None:
        parts += [_noise(steps)]
    parts += [_gaps(found), _frameworks(), _kernels(), _networks()]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]], *, words: bool = False) -> Iterator[str]:
    """A Markdown table; the first column is text, the others are figures, or text too when `words`."""
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "|".join(["---", *["---" if words else "---:"] * (len(head) - 1)]) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _aims(steps: Table, shapes: Table | None) -> str:
    """The aims, judged by predictions whose model's shape was left out; what no fold predicts is judged in sample."""
    outside = {} if shapes is None else {r.aim: r for r in reached(shapes)}
    lines = ["## Aims", ""]
    lines += [
        "Judged with the shape of each row's model left out; in sample stands beside. Memory is fitted by model, so"
    ]
    lines += ["its figures are in sample alone.", ""]
    shown = []
    for r in reached(steps):
        judged = outside.get(r.aim)
        met = ("yes" if (judged or r).met else "no") + ("" if judged else ", in sample")
        shown.append(
            (
                r.aim.what,
                NAMES[r.aim.metric],
                f"{r.rows:,}",
                ("at least " if r.aim.least else "at most ") + _figure(r.aim.metric, r.aim.value),
                "" if judged is None else f"**{_figure(r.aim.metric, judged.value)}**",
                _figure(r.aim.metric, r.value),
                "" if r.trivial is None else f"{r.trivial:.1%}",
                met,
            )
        )
    head = ("rows", "figure", "count", "aim", "left out", "in sample", "trivial", "met")
    return "\n".join([*lines, *_rows(head, shown)])


#: What was left out, the table of it, and the aims of its mean error, bias, coverage and median high/low.
LEFT = (
    ("nothing: in sample", "training_steps"),
    ("shape of the model", "training_steps_shape_left_out"),
    ("device, with its kernels' curves", "training_steps_device_left_out"),
    ("source", "training_steps_source_left_out"),
    ("software, with all its versions", f"training_steps{UNKNOWN}"),
)
#: Metrics of steps that are averaged over sources, and how each is written.
SHOWN = {"mean_ape": "{:.1%}", "bias": "{:+.1%}", "coverage80": "{:.0%}", "width_median": "{:.2f}"}
BY_SOURCE = tuple(SHOWN)


def _left_out(found: list[Table]) -> str:
    """Steps with one thing left out at a time, every source weighing the same."""
    by_name = {table.name: table for table in found}
    known = {s.key.partition("/")[0] for name, t in by_name.items() if name == LEFT[-1][1] for s in t.scored}
    shown = []
    for what, name in LEFT:
        sources = _by_source(by_name[name], known) if name in by_name else []
        if sources:
            mean = {m: np.mean([one[m] for one in sources]) for m in BY_SOURCE if all(m in one for one in sources)}
            figures = (SHOWN[m].format(mean[m]) if m in mean else "" for m in BY_SOURCE)
            shown.append((what, f"{len(sources)}", *figures))
    if not shown:
        return ""
    lines = ["## What is left out", "", HOW_LEFT]
    head = ("left out", "sources", "mean error", "bias", "in 80%", "high/low")
    return "\n".join([*lines, *_rows(head, shown), "", DECLARED])


def _by_source(table: Table, known: Collection[str]) -> list[dict[str, float]]:
    """Metrics of each source whose software is known, so that it can be left out."""
    rows: dict[str, list[Scored]] = {}
    for s in table.scored:
        source = s.key.partition("/")[0]
        if s.time is not None and not s.faulty and source != "megatron_goldens" and (source in known or not known):
            rows.setdefault(source, []).append(s)
    return [metrics(some) for some in rows.values()]


def _choices(found: list[Table]) -> str:
    """Return the section on plans that a search would have taken; "" where no table has groups of plans."""
    head = ("table", "groups", "taken", "ran", "regret", "its median", "winner's curse", "gain realised")
    names = ("ran", "regret_mean", "regret_median", "winners_curse", "gain_realised")
    shown = [
        (t.name, f"{c['groups']:,}", f"{c['chosen']:,}", *(f"{c[n]:.1%}" if n in c else "" for n in names))
        for t in found
        if (c := t.beside.get("choices"))
    ]
    if not shown:
        return ""
    lines = ["## Plans that a search would take", "", "In each group of measured plans (those that ran out of memory"]
    lines += [
        "too) the plan that is predicted fastest of those that fit with a probability of 95%: whether it ran, its"
    ]
    lines += ["measured time over the best measured, by how much more it came out slower than predicted than its group"]
    lines += ["(the winner's curse), and the share of predicted gains up to 30% over it that was measured.", ""]
    return "\n".join([*lines, *_rows(head, shown)])


def _figure(metric: str, value: float) -> str:
    return f"{value:.2f}" if metric == "spearman" else f"{value:.1%}"


def _figures(table: Table) -> str:
    head = ["source/hardware", *(heading for heading, _, _ in text.columns(table))]
    shown = ([f"**{key}**" if key == "all" else key, *cells] for key, cells in text.lines(table))
    return "\n".join([f"## {table.name}", "", *_rows(head, shown)])


def _faults(found: list[Table]) -> str:
    lines = ["## Known faults", ""]
    lines += ["Rows with these flags are predicted and stand under `flagged`; their time is in no other figure.", ""]
    shown = [(t.name, flag, why) for t in found for flag, why in FAULTS.get(t.name, {}).items()]
    return "\n".join([*lines, *_rows(("table", "flag", "reason"), shown, words=True)])


def _noise(steps: Table) -> str:
    """Rows of one source that ran the same plan of the same model more than once."""
    runs: dict[tuple, list[float]] = {}
    for s in steps.scored:
        if s.time is not None and not s.faulty:
            runs.setdefault((s.key, s.group, s.what), []).append(s.time[0])
    apart: dict[str, list[float]] = {}
    for (key, _, _), times in runs.items():
        apart.setdefault(key, []).extend(max(a, b) / min(a, b) - 1 for a, b in combinations(times, 2))
    shown = [
        (key, f"{len(pairs)}", f"{np.median(pairs):.1%}", f"{min(pairs):.1%}", f"{max(pairs):.1%}")
        for key, pairs in sorted(apart.items())
        if pairs
    ]
    lines = ["## Noise floor", ""]
    if not shown:
        return "\n".join([*lines, "No row repeats another."])
    lines += ["Rows that ran the same plan of the same model, and how far apart their measured times are; the larger"]
    lines += ["differences are of sources that do not record everything they changed. `papers:10-19` repeat the plans"]
    lines += ["of `papers:0-9` with other times.", ""]
    return "\n".join([*lines, *_rows(("source/hardware", "pairs", "median", "least", "most"), shown)])


def _gaps(found: list[Table]) -> str:
    lines = ["## Known gaps", ""]
    lines += [f"- {line}" for table in found for line in _weak(table)]
    lines += [GAPS.rstrip()]
    if not any(table.unsupported for table in found):
        return "\n".join(lines)
    lines += ["", "Rows that are not predicted:", ""]
    shown = [(table.name, reason, f"{count:,}") for table in found for reason, count in table.reasons()]
    return "\n".join([*lines, *_rows(("table", "reason", "rows"), shown, words=True)])


def _weak(table: Table) -> Iterator[str]:
    """Yield a line for each weakness that a table's own figures show: groups of rows on which the trivial formula is
    closer, and groups whose 80% interval covers too few or too many rows."""
    worse, narrow = [], []
    for key, m in table.metrics.items():
        if key == "all" or key.endswith("/flagged") or "mean_ape" not in m:
            continue
        if m["mean_ape"] > m.get("trivial_mean_ape", np.inf):
            worse.append(f"{key} ({m['mean_ape']:.0%}, trivial {m['trivial_mean_ape']:.0%})")
        if m.get("timed_rows", 0) >= ENOUGH and not COVERAGE[0] <= m.get("coverage80", 0.8) <= COVERAGE[1]:
            narrow.append(f"{key} ({m['coverage80']:.0%})")
    if worse:
        yield f"`{table.name}`: the trivial formula is closer on {', '.join(worse)}."
    if narrow:
        yield f"`{table.name}`: the 80% interval does not cover 70 to 90% of {', '.join(narrow)}."


def _frameworks() -> str:
    lines = ["## Constants of frameworks", ""]
    lines += [f"- `{name}` ({unit}): {what}" for name, (unit, what) in FRAMEWORK.items()]
    known = sorted(frameworks().values(), key=lambda f: f.name)
    shown = [(f.name, *(f"{getattr(f, name):g}" for name in FRAMEWORK), f.source) for f in known]
    return "\n".join(
        [*lines, "", *_rows(("framework", *(f"`{name}`" for name in FRAMEWORK), "source"), shown, words=True)]
    )


#: Distances of the nearest curve whose spread the page shows.
DISTANCES = (0.1, 1.0, 2.0, 3.0, 5.0)


def _kernels() -> str:
    known, spreads = profiles(serving=True)
    lines = ["## Constants of kernels", "", "Median and 90th percentile of the error of each fitted curve, on whole"]
    lines += ["groups of shapes held out and in sample.", ""]
    curves = [(name, c) for name, p in sorted(known.items()) for c in sorted(p.curves, key=lambda c: (c.op, c.dtype))]
    shown = [
        (name, f"{c.op} {c.dtype}", f"{c.rows:,}", _pair(c.errors, "held_out"), _pair(c.errors, "in_sample"), c.source)
        for name, c in curves
    ]
    lines += _rows(("device", "curve", "rows", "held out", "in sample", "source"), shown, words=True)
    lines += [
        "",
        "What was left out (a device, all of its variants, one of its precisions) was predicted by the curves of",
        "others: the spread (one standard deviation of the log, of kernels from 0.1 to 1 ms) that a price gets whose",
        "nearest curve is so far away, in octaves of what a multiprocessor computes in a clock (another precision: 2);",
        "that of the roofline; and devices behind both.",
        "",
    ]
    heads = (*(f"{distance:g} apart" for distance in DISTANCES), "roofline", "devices")
    lines += _rows(("curve", *heads), _spreads(spreads))
    for op in sorted({c.op for _, c in curves}):
        lines += ["", f"What a `{op}` curve's constants are, and their range over devices:", ""]
        fitted = [c.constants for _, c in curves if c.op == op]
        lines += [
            f"- `{c.name}` ({c.unit}): {c.meaning}; {min(f[c.name] for f in fitted):.3g} to "
            f"{max(f[c.name] for f in fitted):.3g}"
            for c in SHAPES[op].constants
        ]
    return "\n".join(lines)


def _spreads(spreads: Spreads) -> Iterator[tuple[str, ...]]:
    """A line for each kind of curve and precision that some device was left out of."""
    for op, dtype in sorted({(one.op, one.dtype) for one in spreads.rows}):
        alike = [one for one in spreads.rows if one.op == op and width(one.dtype) == width(dtype)]
        cells = [f"{spreads.of(op, distance, dtype)[2]:.2f}" for distance in DISTANCES]
        roof = f"{spreads.by_roofline(op, dtype)[2]:.2f}" if any(one.left == ROOFLINE for one in alike) else ""
        yield f"{op} {dtype}", *cells, roof, f"{len({one.device for one in alike})}"


def _pair(errors: dict[str, float], which: str) -> str:
    if f"{which}_median" not in errors:
        return ""
    return f"{errors[f'{which}_median']:.1%} / {errors[f'{which}_p90']:.1%}"


def _networks() -> str:
    lines = ["## Constants of networks", "", "Median error of each fabric's fit by collective, in sample, and the"]
    lines += ["relative spread its intervals use. A fabric without measurements has its kind's constants.", ""]
    shown = [
        (
            p.name,
            f"{p.rows:,}" if p.rows else "",
            ", ".join(f"{op} {e:.1%}" for op, e in p.median_error.items()),
            ", ".join(f"{op} {s:.2f}" for op, s in p.sigma.items()),
            p.source,
        )
        for p in sorted(shipped().profiles.values(), key=lambda p: p.name)
    ]
    return "\n".join([*lines, *_rows(("fabric", "rows", "median error", "spread", "source"), shown, words=True)])
