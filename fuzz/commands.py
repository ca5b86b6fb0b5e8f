"""The campaign of commands: argument lists, right and wrong, and files beside them, through the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

from fuzz import corpus, mutate
from fuzz.readers import Defect, temporary
from fuzz.texts import data, shorter, written

ASKED = ["gpt3-6.7b", "--on", "8xh100", "--train", "batch=16,seq=1024", "--plan", "tp2 pp2 mb2"]
#: What is asked first, before anything is changed. Verbs that train, measure or serve are left out.
COMMANDS = (
    ["predict", *ASKED],
    ["predict", *ASKED, "--report", "report.html", "--trace", "step.json.gz"],
    ["predict", "question.toml", "--plan", "plan.toml", "--framework", "megatron-core", "--trace", "/dev/full"],
    ["predict", "config.json", *ASKED[1:], "--tokens", "1t", "--days", "30", "--budget", "2M", "--price", "2.10"],
    ["diff", "a.json", "b.json"],
    ["diff", *ASKED, "--plan", "tp4 mb2"],
    ["whatif", *ASKED, "--try", "zero-bubble"],
    ["export", *ASKED[:-1], "fsdp", "--to", "torchtitan"],
    ["export", *ASKED, "--to", "megatron", "--out", "out.sh"],
    ["explain", "P011"],
    ["explain", "overlap"],
    ["catalog", "models"],
    ["catalog", "cluster", "dgx-superpod-h100"],
    ["compare", "trace.json", "trace.json.gz", "--report", "compare.html"],
    ["replay", "trace.json", "--link-scale", "2", "--set", "F=0.9", "--schedule", "gpipe", "--trace", "new.json"],
    ["search", "gpt (small).json", "--on", "2xh100", "--train", "batch=4,seq=128", "--store", "none", "--top", "2"],
    ["search", "question.toml", "--on", "1,2xh100", "--store", "none", "--plot", "plot.svg", "--headroom", "5%"],
    [
        "search",
        "gpt (small).json",
        "--on",
        "2xh100",
        "--train",
        "batch=4,seq=128",
        "--for",
        "megatron",
        "--save",
        "p.toml",
    ],
    ["predict", "resnet-50", "--on", "8xa100-80", "--train", "batch=256,image=224", "--plan", "dp8 mb32"],
    [
        "predict",
        "dlrm-dcnv2",
        "--on",
        "8xh100",
        "--train",
        "batch=65536",
        "--plan",
        "embeddings=auto",
        "--report",
        "r.html",
    ],
    ["search", "dlrm-dcnv2", "--on", "8xh100", "--train", "batch=65536", "--top", "2"],
    ["predict", "sd-2-1", "--on", "4xh100", "--denoise", "images=1,size=512,steps=20", "--plan", "cp4 allgather"],
    [
        *("predict", "youtube-line", "--on", "4xp100", "--train", "batch=100000,walk=40,augment=5,epochs=4000"),
        *("--plan", "partitions=4 buckets=grid episode=50000000"),
    ],
    [
        *("predict", "reddit-gcnii", "--on", "8xa100-80", "--train", "copies=2,skew=1.2"),
        *("--plan", "pp8 gpipe vertex_chunks=32", "--report", "graph.html"),
    ],
    [
        *("predict", *ASKED, "--feed"),
        "workers=2,read=1GB/s,latency=5ms,sample=4B/token,tokenise=lognormal:mean=1us/token;sigma=0.5",
    ],
    ["predict", *ASKED, "--feed", "producers=16,make=50ms,reservoir=600,threshold=100,sample=110kB,read=1GB/s"],
    ["whatif", *ASKED, "--feed", "workers=1,read=1GB/s,latency=800ms,sample=4B/token", "--try", "inflight=4"],
    ["recipe", "recipe.toml", "--json"],
    [
        *("predict", "qwen3-0.6b", "--on", "2xh100", "--train", "seq=1024", "--plan", "dp2"),
        *("--rollout", "prompts=4,samples=2,prompt=64,output=128,control=sync"),
    ],
    ["predict", *ASKED[:-1], "tp2 pp2 mb2 feedback=dfa:micro"],
    ["search", "--show", "--store", "none"],
    ["catalog", "cluster", "4x4xa100,25gbe", "--toml"],
    ["completion", "bash"],
    ["completion", "--words", "meshwright predict llama3-8b --on 8xh1"],
    ["export", "question.toml", "--to", "deepspeed"],
    ["validate"],
    ["reproduce", "no-such-paper"],
    ["--help"],
    ["--version"],
)
#: Codes that a command may end with (see `meshwright.cli.guard`).
ENDS = {0, 1, 2, 74, 141}
#: Options without a value.
SWITCHES = {"--json", "--show", "--toml", "--variants"}
#: Options whose value is a place to write to: mutated ones could be anywhere.
PLACES = {"--report", "--trace", "--out", "--save", "--store", "--markdown", "--rows", "--plot"}


class Commands:
    """Mutated commands; an example is an ``argv``, and a ``file`` with its content where one of those is changed."""

    target, chunk = 20_000, 1_000

    def __init__(self) -> None:
        self.folder = temporary()
        os.environ |= {name: str(self.folder / "kept") for name in ("MESHWRIGHT_HOME", "XDG_CACHE_HOME")}
        os.environ["MESHWRIGHT_DEBUG"] = "1"

    def example(self, rng: Random) -> dict[str, Any]:
        argv = list(rng.choice(COMMANDS))
        named = [word for word in argv if word in files()]
        found: dict[str, Any] = {"argv": argv}
        if named and rng.random() < 0.6:
            name = rng.choice(named)
            found |= {"file": name, **written(name, mutate.text(rng, files()[name], [files()[name]]))}
            found.pop("kind")
        if not named or rng.random() < 0.3:
            for _ in range(rng.choice((1, 1, 2, 3))):
                _change(rng, argv)
        if rng.random() < 0.5:
            argv.append("--json")
        return found

    def look(self, example: dict[str, Any]) -> str:
        for name, content in files().items():
            (self.folder / name).write_bytes(content)
        if "file" in example:
            (self.folder / example["file"]).write_bytes(data(example))
        with contextlib.chdir(self.folder):
            code, out, err = said(example["argv"])
        judge(example["argv"], code, out, err)
        return f"exit {code}"

    def smaller(self, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        argv = example["argv"]
        for i in range(1, len(argv)):
            yield example | {"argv": argv[:i] + argv[i + 1 :]}
        if "file" in example:
            rest = {key: value for key, value in example.items() if key not in ("text", "hex")}
            for less in shorter(data(example)):
                new = written("", less)
                new.pop("kind")
                yield rest | new


def said(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    from meshwright.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


def judge(argv: list[str], code: int, out: str, err: str) -> None:
    """Check that a command keeps what must hold of any, such as a known exit code and no traceback.

    Raises:
        Defect: it does not.
    """
    if code not in ENDS:
        raise Defect(f"exit code {code}: {err[:200]}")
    if "Traceback" in err:
        raise Defect(f"a traceback: {err[-200:]}")
    (out + err).encode("utf-8", "surrogateescape")
    if code and not (out or err):
        raise Defect(f"exit code {code} without a word")
    if _asks_json(argv):
        try:
            answer = json.loads(out, parse_constant=_constant)
        except ValueError as error:
            raise Defect(f"stdout with --json is no JSON: {error}") from None
        if code == 2 and not err and not (isinstance(answer, dict) and answer.get("errors")):
            raise Defect("exit code 2 without errors")


def _asks_json(argv: list[str]) -> bool:
    """Whether a command has to answer in JSON: not where the word is an option's value, nor beside a call for help."""
    alone = [word for before, word in pairwise(["", *argv]) if not before.startswith("-") or before in SWITCHES]
    return "--json" in alone and not {"--help", "-h", "--version", "help"} & set(argv)


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _change(rng: Random, argv: list[str]) -> None:
    """An argument changed, dropped, doubled, moved or added; never the value of a place, nor a path that leaves it."""
    at = rng.randrange(len(argv))
    free = [i for i in range(1, len(argv)) if argv[i - 1] not in PLACES and argv[i] not in files()]
    match rng.randrange(7):
        case 0 | 1 | 2 if free:
            at = rng.choice(free)
            new = mutate.text(rng, os.fsencode(argv[at]), list(map(os.fsencode, argv)))
            argv[at] = new.decode("utf-8", "surrogateescape").replace("/", "").replace("\0", "")[:3000]
        case 3 if at not in (0,) and argv[at - 1] not in PLACES:
            del argv[at]
        case 4:
            argv.insert(at, argv[at])
        case 5:
            argv.append(rng.choice(EXTRA))
        case _:
            kind = rng.choice(("plan", "workload", "cluster", "model"))
            argv.append(rng.choice(corpus.seeds()[kind]).decode().replace("/", ""))


EXTRA = (
    "--json",
    "--plan",
    "--on",
    "--nothing",
    "--json=1",
    "-h",
    "--",
    "",
    "é",
    "--framework",
    "--top",
    "=",
    "-",
    "--report",
)


@cache
def files() -> dict[str, bytes]:
    """The files that commands name, before anything is changed."""
    seeds = corpus.seeds()
    plain, packed = seeds["trace.json"]
    _, first, _ = said(["predict", *ASKED, "--json"])
    _, second, _ = said(["predict", *ASKED[:-1], "tp4 mb2 zero1", "--json"])
    config = next(text for text in seeds["config.json"] if b"gpt2" in text)
    small = json.dumps(json.loads(config) | {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 512}).encode()
    return {
        "question.toml": corpus.QUESTION.encode(),
        "plan.toml": seeds["plan.toml"][0],
        "config.json": config,
        "gpt (small).json": small,
        "a.json": first.encode(),
        "recipe.toml": (corpus.ROOT / "examples" / "recipe.toml").read_bytes(),
        "b.json": second.encode(),
        "trace.json": plain,
        "trace.json.gz": packed,
    }
