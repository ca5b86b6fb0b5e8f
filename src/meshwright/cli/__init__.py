"""The command line: one verb per file, each loaded only when it is called.

stdout is the result, stderr progress and errors. Exit 0: yes; 1: it ran, and the answer is no (the plan does
not fit); 2: misuse, with everything that is wrong listed at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

#: Verb -> what it does, in one line; each is a module here with a ``run(argv) -> exit code``.
COMMANDS = {
    "init": "A question file from five answers, or from a preset: where to begin",
    "predict": "How long a training step takes, or how fast requests are answered, whether a plan fits, and why",
    "search": "The fastest plan that fits, out of the whole space, and why the others lost",
    "run": "Train a plan for real with torch.distributed, with its prediction beside it",
    "converge": "Sync policies trained at equal tokens on real text, their losses side by side",
    "weights": "A checkpoint of a run as published weights: safetensors with Hugging Face's names",
    "emulate": "Run a plan on emulated hosts: compute slept, communication real, the prediction beside it",
    "serve": "A plan's engine behind OpenAI's protocol: completions, chats, streams, figures",
    "bench-serve": "A workload's requests sent to an OpenAI-compatible server, and its latencies",
    "compare": "Where prediction and measurement of a plan part: by kind of task, queue and critical path",
    "diagnose": "Which rank or link of a traced job is slow or hangs, and what that costs",
    "replay": "What a measured step would take on a faster link, under another schedule or bucket size",
    "diff": "Why two predictions, plans, clusters or models differ",
    "papers": "Published systems: what each does, and whether its figures are reproduced",
    "reproduce": "One paper's figures beside ours, with the error and what is assumed",
    "whatif": "What a published technique does to a plan: gain, memory, exact or not",
    "recipe": "The fastest legal order of a recipe of data operators, with its time and memory",
    "lower": "The task graph of a plan, pass by pass",
    "place": "Placements of a model's tensors, or of a computation of your own, completed, priced and trained",
    "export": "The plan as a configuration of a training or serving engine: Megatron-LM, vLLM, Kubernetes and more",
    "ui": "The question as a local page: controls, the live answer, a search with its progress",
    "explain": "What a word or an error code means",
    "validate": "How wrong the predictions are, on measured runs",
    "completion": "What makes a shell complete commands, options and words",
    "cluster": "The cluster of the machine this runs on, as a file: --detect",
    "calibrate": "Measure this machine (--here), or fit cost curves to tables of measurements",
    "catalog": "Models, devices, clusters and schedules that are known, with their sources",
}

#: Verbs that neither train nor measure anything.
THINKING = {
    "predict",
    "search",
    "diff",
    "whatif",
    "papers",
    "reproduce",
    "export",
    "lower",
    "explain",
    "catalog",
    "cluster",
    "init",
    "recipe",
}

EXAMPLE = 'meshwright predict llama3-70b --on 64xh100 --train batch=512,seq=8192 --plan "tp8 pp4 vpp5 zero1"'


def usage() -> str:
    """Return the text of ``meshwright --help``."""
    from meshwright import NOT_YET, SUMMARY

    verbs = "\n".join(f"  {name:<11} {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: meshwright COMMAND [OPTIONS]\n\n"
        f"{SUMMARY}.\n{NOT_YET}.\n\n"
        f"commands:\n{verbs}\n\n"
        "options:\n"
        "  -h, --help   this text; meshwright COMMAND --help for the options of a command\n"
        "  --version    the version\n\n"
        f"example:\n  {EXAMPLE}\n\n"
        "Every command takes --json. Exit code 0: yes; 1: the plan does not fit; 2: misuse."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. `argv` is without the program's name, None for the process's own."""
    from meshwright.cli.guard import guarded

    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _settle(words)
    return guarded(lambda: _dispatch(words), as_json="--json" in words)


def _settle(words: list[str]) -> None:
    """Tune a process that runs only this command: cyclic garbage is collected less often, as little of it arises; and a
    command that only thinks starts no threads for numpy's products of matrices, which are small here."""
    gc.set_threshold(50_000, 20, 100)
    if words and words[0] in THINKING:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(usage())
    elif command == "--version":
        from meshwright import __version__

        print(f"meshwright {__version__}")
    elif command in COMMANDS:
        return import_module(f"meshwright.cli.{command.replace('-', '_')}").run(rest)
    else:
        _refuse(command)
    return 0


def _refuse(command: str) -> None:
    from meshwright.errors import MeshwrightError, nearest

    raise MeshwrightError.one(
        "X002", f"no command {command!r}", place="meshwright COMMAND", help=nearest(command, list(COMMANDS))
    )
