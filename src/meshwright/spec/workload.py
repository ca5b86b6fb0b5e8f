"""The workload: what one optimizer step has to do, apart from how it is laid out.

``batch=512,seq=8192`` is a step of 512 sequences of 8192 tokens each. Documents of other lengths packed into
the sequences (``lengths=``) change the attention work: with boundaries respected, a sequence of L tokens made
of documents of length l costs L * E[l^2] / E[l] score entries instead of L^2.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import msgspec

from meshwright.catalog import meant, words
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import parse_count, write_count

#: Compute precisions of the matrix multiplications, with bytes per element as stored for the multiply.
DTYPE_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_row": 1.0,
    "fp8_block": 1.0,
    "mxfp8": 1.0,
    "nvfp4": 0.5,
}
PHASES = ("pretrain", "sft", "lora")
#: Optimizers with the fp32-sized moments they keep per parameter.
OPTIMIZER_MOMENTS: dict[str, float] = {
    "adamw": 2.0,
    "adam": 2.0,
    "lion": 1.0,
    "muon": 1.0,
    "sgd": 0.0,
    "momentum": 1.0,
}
#: Largest batch, length and rank: above, a slip of the keyboard.
MAX_COUNT = 10**9
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


class Lengths(msgspec.Struct, frozen=True):
    """Document lengths in tokens with their share of the documents; shares sum to 1."""

    tokens: tuple[int, ...]
    share: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(t * s for t, s in zip(self.tokens, self.share))

    @property
    def attended(self) -> float:
        """E[l^2] / E[l]: the context an average token's document has, in tokens."""
        return sum(t * t * s for t, s in zip(self.tokens, self.share)) / self.mean


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al., 2021, arXiv 2106.09685): the base is frozen, so it has no weight gradient
    and no optimizer state; each target matrix gets two factors of the given rank."""

    rank: int = 16
    targets: tuple[str, ...] = ("q", "k", "v", "o")


class Train(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. ``global_batch`` counts sequences per step, ``seq_len`` tokens per sequence.

    ``tokens`` (0 = not asked) is what time and cost to train are reported for. ``dropout`` matters for memory
    (its masks are saved) and time (one more kernel). ``causal`` False is bidirectional attention.
    """

    global_batch: int
    seq_len: int
    lengths: Lengths | None = None
    optimizer: str = "adamw"
    dtype: str = "bf16"
    tokens: float = 0.0
    phase: str = "pretrain"
    lora: Lora | None = None
    dropout: bool = False
    causal: bool = True

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def longest_document(self) -> int:
        """Tokens of the longest run of positions: a sequence's, or of the longest document packed into it."""
        return self.seq_len if self.lengths is None else min(max(self.lengths.tokens), self.seq_len)

    @property
    def attended(self) -> float:
        """Tokens of context a document's last token attends to: ``seq_len`` unless documents are packed."""
        return float(self.seq_len) if self.lengths is None else min(self.lengths.attended, float(self.seq_len))

    def text(self) -> str:
        """The form :func:`parse` reads back."""
        parts = [f"batch={self.global_batch}", f"seq={self.seq_len}"]
        default = Train(global_batch=1, seq_len=1)
        for key, name in (("optimizer", "optimizer"), ("dtype", "dtype"), ("phase", "phase")):
            if getattr(self, name) != getattr(default, name):
                parts.append(f"{key}={getattr(self, name)}")
        if self.lengths is not None:
            parts.append("lengths=" + ";".join(f"{t}:{s:.6g}" for t, s in zip(self.lengths.tokens, self.lengths.share)))
        if self.tokens:
            parts.append(f"tokens={write_count(self.tokens)}")
        if self.lora is not None:
            parts += [f"rank={self.lora.rank}", "targets=" + "+".join(self.lora.targets)]
        if self.dropout:
            parts.append("dropout=yes")
        if not self.causal:
            parts.append("causal=no")
        return ",".join(parts)


def parse(text: str, *, place: str = "--train") -> Train:
    """``batch=512,seq=8k,dtype=fp8,tokens=15t`` as a :class:`Train`.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 missing key, W005 contradiction; all of them at once.
    """
    found: list[Diagnostic] = []
    given: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        key, value = key.strip().lower(), value.strip()
        if given.setdefault(key, value) != value:
            found.append(
                Diagnostic(
                    code="W005",
                    message=f"{key}={given[key]} and {key}={value} contradict each other",
                    place=f"{place} {text!r}",
                    help="keep one of them",
                )
            )
    values: dict[str, object] = {}
    lora: dict[str, object] = {}
    for key, value in given.items():
        if key not in _READERS:
            help = f"write phase={key}" if key in PHASES else meant(key, list(_READERS))
            found.append(
                Diagnostic(
                    code="W001", message=f"unknown workload key {key!r}", place=f"{place} {key}={value}", help=help
                )
            )
            continue
        name, reader, wanted = _READERS[key]
        try:
            read = reader(value)
        except MeshwrightError as error:
            found += error.diagnostics
            continue
        if read is None:
            found.append(
                Diagnostic(
                    code="W002",
                    message=f"{key} = {value!r} is not {wanted}",
                    place=f"{place} {key}={value}",
                    help=f"write {key}=<{wanted}>" + (f"; meshwright explain {value}" if value in words() else ""),
                )
            )
        elif name.startswith("lora."):
            lora[name[5:]] = read
        else:
            values[name] = read
    for key, name in (("batch", "global_batch"), ("seq", "seq_len")):
        if key not in given and not any(_READERS.get(k, ("",))[0] == name for k in given):
            found.append(
                Diagnostic(
                    code="W003",
                    message=f"the workload does not say {key}",
                    place=f"{place} {text!r}",
                    help="for example batch=512,seq=8192",
                )
            )
    if lora and values.get("phase", "lora") != "lora":
        found.append(
            Diagnostic(
                code="W002",
                message=f"rank and targets belong to phase=lora, not to phase={values['phase']}",
                place=f"{place} {text!r}",
                help="drop them or write phase=lora",
            )
        )
    if found:
        raise MeshwrightError(found)
    if lora or values.get("phase") == "lora":
        values |= {"phase": "lora", "lora": Lora(**lora)}
    return Train(**values)


def _count(value: str) -> int | None:
    read = parse_count(value, binary_k=True)
    return read if read is not None and 0 < read <= MAX_COUNT else None


def _tokens(value: str) -> float | None:
    read = parse_count(value)
    return float(read) if read is not None and read > 0 else None


def _yes_no(value: str) -> bool | None:
    return {"yes": True, "true": True, "1": True, "on": True, "no": False, "false": False, "0": False}.get(
        value.lower()
    )


def _one_of(choices):
    return lambda value: value.lower() if value.lower() in choices else None


def _targets(value: str) -> tuple[str, ...] | None:
    if value == "all":
        return LORA_TARGETS
    read = tuple(value.lower().split("+"))
    return read if all(t in LORA_TARGETS for t in read) else None


def _lengths(value: str) -> Lengths | None:
    """``512:0.5;2048:0.5`` or the path of a one-column CSV of document lengths."""
    if Path(value).suffix == ".csv":
        return _lengths_file(Path(value))
    pairs = [p.partition(":") for p in value.split(";")]
    tokens = [parse_count(t, binary_k=True) for t, _, _ in pairs]
    try:
        weight = [float(w) if w else 1.0 for _, _, w in pairs]
    except ValueError:
        return None
    if any(t is None or t < 1 for t in tokens) or any(not math.isfinite(w) or w <= 0 for w in weight):
        return None
    total = sum(weight)
    return Lengths(tuple(tokens), tuple(w / total for w in weight))


#: Digits of the longest document length that is read.
DIGITS = 18


def _lengths_file(path: Path) -> Lengths:
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text, a length a line"
        raise MeshwrightError.one(
            "W004", f"cannot read the document lengths: {reason}", place=f"lengths={path}"
        ) from None
    counts: dict[int, int] = {}
    bad = []
    for number, row in enumerate(rows, 1):
        cell = row[0].strip() if row else ""
        if cell.isdecimal() and len(cell) <= DIGITS and int(cell) > 0:
            counts[int(cell)] = counts.get(int(cell), 0) + 1
        elif cell and not (number == 1 and not cell[0].isdigit()):
            bad.append(f"{path}:{number}: {cell!r}")
    if bad or not counts:
        raise MeshwrightError.one(
            "W004",
            "document lengths must be positive whole numbers, one a line" if bad else "the file has no lengths",
            place="; ".join(bad[:5]) or str(path),
        )
    total = sum(counts.values())
    ordered = sorted(counts)
    return Lengths(tuple(ordered), tuple(counts[t] / total for t in ordered))


_READERS = {
    "batch": ("global_batch", _count, "a positive number of sequences up to 1e9"),
    "global_batch": ("global_batch", _count, "a positive number of sequences up to 1e9"),
    "seq": ("seq_len", _count, "a positive number of tokens up to 1e9"),
    "seq_len": ("seq_len", _count, "a positive number of tokens up to 1e9"),
    "lengths": ("lengths", _lengths, "lengths with shares such as 512:0.5;2048:0.5, or a .csv"),
    "optimizer": ("optimizer", _one_of(OPTIMIZER_MOMENTS), f"one of {', '.join(OPTIMIZER_MOMENTS)}"),
    "dtype": ("dtype", _one_of(DTYPE_BYTES), f"one of {', '.join(DTYPE_BYTES)}"),
    "tokens": ("tokens", _tokens, "a number of tokens such as 15t"),
    "phase": ("phase", _one_of(PHASES), f"one of {', '.join(PHASES)}"),
    "rank": ("lora.rank", _count, "a positive rank up to 1e9"),
    "targets": ("lora.targets", _targets, f"some of {'+'.join(LORA_TARGETS)}, or all"),
    "dropout": ("dropout", _yes_no, "yes or no"),
    "causal": ("causal", _yes_no, "yes or no"),
}
#: Keys that a workload may say.
KEYS = tuple(_READERS)
