"""The five questions of ``meshwright init``: what each asks, what it is by default, and what an answer means.

An answer is read by the readers of the options, so that what is wrong with it is said as everywhere, and asked again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import write_count

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

MODEL, CLUSTER = "llama3-8b", "8xh100"
#: Tokens of a step where nobody says, and below this many devices: what runs of these sizes were published with.
STEP_TOKENS, FEW_STEP_TOKENS, FEW_DEVICES = 2**22, 2**18, 16
#: Longest sequence where nobody says; models that take less get what they take.
SEQUENCE = 8192
#: Tokens a parameter where nobody says (Hoffmann et al. 2022, arXiv 2203.15556), and bytes of English text a token of
#: a vocabulary of 100,000 or more stands for, about.
TOKENS_PER_PARAMETER, BYTES_PER_TOKEN = 20, 4.0
#: 25,000 conversations of 2,000 tokens.
FINE_TUNING_TOKENS = "50m"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])i?b(?:ytes)?(?:\s+of\s+text)?", re.IGNORECASE)
_BYTES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


class Answers(msgspec.Struct, kw_only=True):
    """Answers given or taken by default, as a question file says them, and their meaning as far as it is known."""

    said: dict[str, str] = {}
    model: Model | None = None
    cluster: Cluster | None = None
    train: Train | None = None


class AskedField(msgspec.Struct, frozen=True):
    """One of the five: the question, its default given the answers before it, and what reads an answer into them.
    ``fields`` are those of a question file that it fills."""

    fields: tuple[str, ...]
    question: str
    default: Callable[[Answers], str]
    take: Callable[[str, Answers], None]


def _take_model(text: str, answers: Answers) -> None:
    from meshwright.spec.model import load

    answers.model = load(text)
    answers.said["model"] = text


def _take_cluster(text: str, answers: Answers) -> None:
    from meshwright.spec.cluster_range import load_all

    answers.cluster = load_all(text)[-1][1]
    answers.said["on"] = text


def _take_train(text: str, answers: Answers) -> None:
    from meshwright.spec.workload import parse

    answers.train = parse(text)
    answers.said["train"] = text


def usual_train(answers: Answers) -> str:
    """A step of about 4 million tokens, of a quarter million on few devices, in sequences the model takes; at least
    one sequence for each device."""
    longest = answers.model.max_seq_len if answers.model is not None else 0
    devices = answers.cluster.num_devices if answers.cluster is not None else 1
    seq = min(SEQUENCE, longest or SEQUENCE)
    tokens = FEW_STEP_TOKENS if devices < FEW_DEVICES else STEP_TOKENS
    batch = max(tokens // seq, devices)
    return f"batch={-(-batch // devices) * devices},seq={seq}"


def _take_tokens(text: str, answers: Answers) -> None:
    from meshwright.spec.goal import read_tokens, with_tokens

    tokens = read_tokens(tokens_of(text))
    known = answers.train.tokens if answers.train is not None else 0.0
    if answers.train is not None:
        answers.train = with_tokens(answers.train, tokens)
    if not known:  # else the workload says it
        answers.said["tokens"] = write_count(tokens)


def tokens_of(text: str) -> str:
    """A number of tokens as it was said, or that of an amount of text: ``40GB`` is about 10 billion."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return text
    return write_count(round(float(match[1]) * _BYTES[match[2].lower()] / BYTES_PER_TOKEN))


def usual_tokens(answers: Answers) -> str:
    """Return the default number of tokens: the workload's, else 20 a parameter, rounded to two digits, and much fewer
    for fine-tuning."""
    if answers.train is not None and answers.train.tokens:
        return write_count(answers.train.tokens)
    if answers.train is not None and answers.train.phase != "pretrain":
        return FINE_TUNING_TOKENS
    params = answers.model.num_params if answers.model is not None else 1e9
    return write_count(float(f"{TOKENS_PER_PARAMETER * params:.1e}"))


def _take_goal(text: str, answers: Answers) -> None:
    from meshwright.cli.question import read_goal
    from meshwright.spec.goal import absent, priced, read_price

    words = {} if text == NONE else goal_words(text)
    question, wrong = _of(answers.said | words), []
    cluster = answers.cluster
    if "price" in words and cluster is not None:
        price = read_price(words["price"])
        wrong += absent(price, {i.device.name for i in cluster.islands}, cluster.name)
        cluster = priced(cluster, price)
    _, found = read_goal(question, [part for part in (answers.train, cluster) if part is not None])
    if wrong or found:
        raise MeshwrightError([*wrong, *found])
    answers.said |= words


NONE = "none"


def goal_words(text: str) -> dict[str, str]:
    """Deadline, budget and price as the words of an answer say them: ``30d $2M price=2.10``.

    Raises:
        MeshwrightError: B001 for every word that is none of them.
    """
    words: dict[str, str] = {}
    wrong: list[Diagnostic] = []
    for word in text.replace(" days", "d").replace(" hours", "h").replace(" weeks", "w").split():
        name, equals, value = word.partition("=")
        if equals and name.lower() in ("days", "budget", "price"):
            words[name.lower()] = value
        elif re.fullmatch(r"[\d.]+[dhw]", word, re.IGNORECASE):
            words["days"] = word
        elif word.startswith("$"):
            words["budget"] = word
        else:
            help = "30d for a deadline, $2M for a budget, price=2.10 for a device-hour; several with blanks, or none"
            wrong.append(Diagnostic(code="B001", message=f"{word!r} is no deadline, budget or price", help=help))
    if wrong:
        raise MeshwrightError(wrong)
    return words


def _of(said: dict[str, str]) -> Any:
    from meshwright.cli.question import Question

    return Question(**said)


def usual_cluster(_answers: Answers) -> str:
    """The devices of this machine, where they can be seen and the catalog has them; else a node of H100."""
    from meshwright.detect import Here, detect
    from meshwright.spec.cluster import load

    try:
        found = detect(Here()).cluster
        name = f"{found.num_devices}x{found.islands[0].device.name}"
        load(name)
    except MeshwrightError:
        return CLUSTER
    return name


FIVE = (
    AskedField(
        ("model",), "Model, a catalog name (meshwright catalog models) or a config.json", lambda _: MODEL, _take_model
    ),
    AskedField(
        ("on",),
        "Devices: 64xh100, nodes x devices with their network 4x4xa100,25gbe, or a range 8..512xh100",
        usual_cluster,
        _take_cluster,
    ),
    AskedField(
        ("train",),
        "A step: sequences and tokens in each; phase=lora or phase=sft to fine-tune",
        usual_train,
        _take_train,
    ),
    AskedField(
        ("tokens",), "Tokens in all (1t), or an amount of text (40GB, at 4 bytes a token)", usual_tokens, _take_tokens
    ),
    AskedField(
        ("days", "budget", "price"),
        "Deadline, budget, price of a device-hour: 30d $2M price=2.10",
        lambda _: NONE,
        _take_goal,
    ),
)


def ask(asked: AskedField, number: int, answers: Answers) -> None:
    """Put one of the five questions on the terminal until its answer can be read; an empty answer is the default.

    Raises:
        EOFError: the answers have ended.
        KeyboardInterrupt: somebody ended them.
    """
    default = asked.default(answers)
    while True:
        print(f"{number}/{len(FIVE)}  {asked.question}\n     [{default}] ", end="", file=sys.stderr, flush=True)
        try:
            asked.take(input().strip() or default, answers)
            return
        except MeshwrightError as error:
            print("\n".join(map(str, error.diagnostics)), file=sys.stderr)
