"""The workload: the work of one optimizer step, apart from how it is laid out.

``batch=512,seq=8192`` is a step of 512 sequences of 8192 tokens each. Documents of other lengths (``lengths=``) are
drawn with a ``seed`` and laid into those sequences as ``pack=`` says (:mod:`meshwright.assign.packing`). Attention
stays within documents, so that a sequence of documents of length l costs the sum of l^2 score entries.
"""

from __future__ import annotations

from math import gcd, nextafter
from pathlib import Path

import msgspec

from meshwright.catalog import meant, words
from meshwright.errors import Diagnostic, MeshwrightError, unseparated
from meshwright.quantity import parse_count, write_count
from meshwright.spec import lengths as of_documents
from meshwright.spec.items import Batch, Item
from meshwright.spec.lengths import LOGNORMAL, PARAMETERS, Lengths
from meshwright.spec.lora import LORA_TARGETS, Lora, read_alpha, read_targets
from meshwright.spec.routing import Routing
from meshwright.spec.routing import read as read_routing
from meshwright.spec.workload_rules import contradictions, fitted_lengths

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
    "int8": 1.0,
}
#: Precisions whose products are sums of products of single bits: weights of so many bits and values of so many, each
#: bit of the one with each of the other (Ma et al. 2024, 2409.17870).
BIT_PRODUCTS: dict[str, tuple[int, int]] = {
    f"w{weight}a{value}": (weight, value) for weight in (1, 2, 3, 4) for value in (1, 2, 4, 8) if weight <= value
}
DTYPE_BYTES |= {name: value / 8 for name, (_, value) in BIT_PRODUCTS.items()}
#: Products of these precisions serve trained models alone: nothing is trained in whole numbers.
SERVED_DTYPES = ("int8", *BIT_PRODUCTS)
TRAINED_DTYPES = tuple(name for name in DTYPE_BYTES if name not in SERVED_DTYPES)
#: Bytes of one weight as a quantised checkpoint stores it, with its share of the scales: 16 bits for 128 weights (int4
#: of GPTQ, AWQ and MARLIN), 8 bits for 32 (OCP's mxfp4), 8 for 16 (nvfp4); int8 and fp8 have one for a whole channel.
WEIGHT_BYTES: dict[str, float] = {
    "int8": 1.0,
    "fp8": 1.0,
    "int4": 0.5 + 2 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
#: Bytes of one weight of a frozen base that is stored quantised and multiplied in 16 bits, with its share of scales:
#: one of 32 bits for 64 weights (nf4 of QLoRA, 2305.14314, section 3), that quantised again to 8 bits with one of
#: 32 bits for 256 of them (nf4-dq, its double quantisation), one of 16 bits for 128 (int4 of GPTQ), one a channel
#: (int8).
FROZEN_BYTES: dict[str, float] = {
    "nf4": 0.5 + 4 / 64,
    "nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256),
    "int4": WEIGHT_BYTES["int4"],
    "int8": 1.0,
}


def multiplied_bytes(dtype: str) -> float:
    """Return the bytes of one weight that is stored as it is multiplied."""
    return BIT_PRODUCTS[dtype][0] / 8 if dtype in BIT_PRODUCTS else DTYPE_BYTES[dtype]


#: Bytes of one value as gradients, masters and moments are stored.
STORED_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "none": 0.0, "int8": 1.0 + 4 / 256}
#: Formats that only moments are stored in: 8 bits with a scale of 32 bits for each 256 values (block-wise quantisation,
#: Dettmers et al. 2110.02861; blocks of 256 since bitsandbytes 0.44, of 2048 before, which is 0.002 bytes less).
OF_MOMENTS = ("int8",)
PHASES = ("pretrain", "sft", "lora")
#: Optimizers with the fp32-sized moments they keep per parameter.
OPTIMIZER_MOMENTS: dict[str, float] = {
    "adamw": 2.0,
    "adam": 2.0,
    "lion": 1.0,
    "muon": 1.0,
    "sgd": 0.0,
    "momentum": 1.0,
    "lamb": 2.0,
    "lars": 1.0,
    "adagrad": 1.0,
}
#: Optimizers whose step of a matrix depends on norms of all of it.
LAYERWISE = ("lamb", "lars")
#: Largest batch, length and rank: above, a slip of the keyboard.
MAX_COUNT = 10**9
#: Largest image, in pixels along a side.
MAX_SIDE = 30_000
#: How documents are laid into sequences: whole documents, as many as fit; one a sequence, filled up; in microbatches of
#: equal tokens and equal attention; as many as fit, with the sequences of each batch dealt to ranks and put in order by
#: their attention; one behind the other, cut where a sequence ends.
REORDERED = "reordered"
PACKS = ("packed", "padded", "balanced", REORDERED, "concat")
#: Those that lay out a whole global batch by what its documents cost.
OVER_BATCHES = ("balanced", REORDERED)
#: Whose choices a balance loss evens out, and its usual weight (Switch Transformers, 2101.03961, section 2.2).
BALANCES, BALANCE_WEIGHT = ("micro", "global"), 0.01
#: The word for balance by selection biases, without a loss or beside it, and how far a step moves them: DeepSeek-V3's
#: bias update speed for the first 14.3T tokens of its pre-training (2412.19437, section 4.2).
SELECTION_BIAS, BIAS_RATE = "bias", 0.001


class Train(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. ``global_batch`` counts sequences per step, ``seq_len`` tokens per sequence.

    ``tokens`` (0 = not asked) is what time and cost to train are reported for. ``dropout`` matters for memory
    (its masks are saved) and time (one more kernel). ``causal`` False is bidirectional attention. ``pack`` is one of
    :data:`PACKS`, "" where nobody said it, and ``seed`` what documents are drawn with. With ``grow`` the batch becomes
    larger, up to ``most`` sequences, where the norm test of that bound says so; with ``align`` learning rates of the
    embedding and the head follow the spread of their gradients, smoothed by so much; with ``clusters`` steps take turns
    on so many parts of the text, and each part has a momentum of its own. ``routing`` is how often a mixture's router
    chooses each expert. ``balance`` adds ``balance_weight`` times the routers' balance loss, of each rank's
    ``micro``batch or of the ``global`` batch, and ``locality`` so many times the probability of experts on other nodes.
    ``adversarial``: half of a step's loss is that of its text with embeddings moved so far, in parts of their own
    length, along the gradient by weights one step old; 0: none. ``bias_rate`` is how far every step moves the selection
    biases of routers towards even loads; 0: they stay.
    ``frames``: a sequence is a video of so many frames; 0: it is none. ``image``: each is an image of so many pixels a
    side, and ``seq_len`` counts its pixels; ``features``: each is a vector of so many numbers; 0: none is.
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
    pack: str = ""
    seed: int = 0
    grow: float = 0.0
    most: int = 0
    align: float = 0.0
    clusters: int = 0
    adversarial: float = 0.0
    routing: Routing | None = None
    balance: str = ""
    balance_weight: float = BALANCE_WEIGHT
    bias_rate: float = 0.0
    locality: float = 0.0
    frames: int = 0
    image: int = 0
    features: int = 0

    @property
    def moments(self) -> int:
        """Moments that the optimizer keeps of each parameter."""
        return int(OPTIMIZER_MOMENTS[self.optimizer]) * max(1, self.clusters)

    @property
    def packing(self) -> str:
        """How documents are laid into sequences; "" where sequences are whole."""
        return self.pack or ("packed" if self.lengths is not None else "")

    @property
    def counted(self) -> str:
        """The things that rates, prices and ``tokens`` count: tokens, images read by pixels, or samples of features."""
        return "images" if self.image else "samples" if self.features else "tokens"

    @property
    def each(self) -> str:
        """A batch's sequences in words: ``sequences of 8192 tokens``."""
        if self.features:
            return f"vectors of {self.features} features"
        return f"images of {self.image} x {self.image} pixels" if self.image else f"sequences of {self.seq_len} tokens"

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens that a step trains on, or images, as they are ``counted``."""
        return self.global_batch * (1 if self.image else self.seq_len)

    @property
    def longest_document(self) -> int:
        """Tokens of the longest run of positions: a sequence's, or of the longest document packed into it."""
        return self.seq_len if self.lengths is None else min(max(self.lengths.tokens), self.seq_len)

    @property
    def attended(self) -> float:
        """Tokens of context a document's last token attends to, on average by token: ``seq_len`` unless documents are
        laid into sequences. Padding is a document of its own; of documents that are cut pieces count."""
        if self.lengths is None:
            return float(self.seq_len)
        row, documents = float(self.seq_len), list(zip(self.lengths.tokens, self.lengths.share))
        if self.packing == "padded":
            return sum(share * (length**2 + (row - length) ** 2) for length, share in documents) / row
        if self.packing != "concat":
            return self.lengths.attended
        # Documents and sequences of s tokens begin at multiples of what divides all their lengths, g, so a sequence
        # ends at any multiple of it in a document: of one of l tokens within a sequence, with a chance of l / s, which
        # leaves (2 l^2 + g^2) / 3 of its squares; the ends of a longer one take (s^2 - g^2) / 3 from its l s.
        step = gcd(self.seq_len, *self.lengths.tokens)
        ends = ((min(n, row) ** 2 - step**2) * min(n / row, 1.0) / 3 for n, _ in documents)
        squares = ((n * min(n, row) - end, share) for end, (n, share) in zip(ends, documents))
        return sum(share * square for square, share in squares) / self.lengths.mean

    def rows(self, sequences: int) -> int:
        """Return the rows that a microbatch of so many sequences is, each attended to for itself."""
        return 1 if self.packing == "balanced" else sequences

    def microbatch(self, sequences: int) -> Batch:
        """Return the items of a microbatch of `sequences` sequences: all alike. Where documents are packed each stands
        for the mean of them; those that were drawn are :func:`meshwright.assign.draws.draw`'s."""
        return ((Item(self.seq_len, self.attended, frames=max(1, self.frames)), sequences),)

    def text(self) -> str:
        """The form :func:`parse` reads back."""
        size = f"image={self.image}" if self.image else f"seq={self.seq_len}"
        parts = [f"batch={self.global_batch}", f"features={self.features}" if self.features else size]
        default = Train(global_batch=1, seq_len=1)
        for key, name in (("optimizer", "optimizer"), ("dtype", "dtype"), ("phase", "phase")):
            if getattr(self, name) != getattr(default, name):
                parts.append(f"{key}={getattr(self, name)}")
        if self.lengths is not None:
            parts.append(f"lengths={self.lengths.text()}")
        if self.pack:
            parts.append(f"pack={self.pack}")
        if self.seed:
            parts.append(f"seed={self.seed}")
        if self.grow:
            parts += [f"grow={self.grow:g}", f"most={self.most}"]
        if self.clusters:
            parts.append(f"clusters={self.clusters}")
        if self.align:
            parts.append(f"align={self.align:g}")
        if self.adversarial:
            parts.append(f"adversarial={self.adversarial:g}")
        if self.routing is not None:
            parts.append(f"routing={self.routing.text()}")
        if self.balance or self.bias_rate:
            said = ((self.balance, self.balance_weight, BALANCE_WEIGHT), (SELECTION_BIAS, self.bias_rate, BIAS_RATE))
            each = (name + ("" if value == usual else f":{value:g}") for name, value, usual in said if name and value)
            parts.append(f"balance={'+'.join(each)}")
        if self.locality:
            parts.append(f"locality={self.locality:g}")
        if self.frames:
            parts.append(f"frames={self.frames}")
        if self.tokens:
            parts.append(f"tokens={write_count(self.tokens)}")
        if self.lora is not None:
            parts.append(self.lora.text())
        if self.dropout:
            parts.append("dropout=yes")
        if not self.causal:
            parts.append("causal=no")
        return ",".join(parts)


def parse(text: str, *, place: str = "--train", base: Path = Path()) -> Train:
    """``batch=512,seq=8k,dtype=fp8,tokens=15t`` as a :class:`Train`; files of lengths lie in `base`.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 missing key, W004 wrong lengths, W005 contradiction,
            W007 lengths beyond a sequence; all of them at once.
    """
    found: list[Diagnostic] = []
    given: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        key, value = key.strip().lower(), value.strip()
        if key in PARAMETERS and given.get("lengths", "").lower().startswith(f"{LOGNORMAL}:"):
            given["lengths"] += f";{key}={value}"  # lengths=lognormal:mean=2048,sigma=1
            continue
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
            message, where = f"unknown workload key {key!r}", f"{place} {key}={value}"
            if not value and key not in PHASES:
                message, where = f"{key!r} does not say of what it is the value", f"{place} {text!r}"
                help = "a workload is KEY=VALUE with commas between them: batch=512,seq=8192"
            found.append(Diagnostic(code="W001", message=message, place=where, help=help))
            continue
        name, reader, wanted = _READERS[key]
        try:
            read = reader(value, base) if key in FILES else reader(value)
        except MeshwrightError as error:
            found += error.diagnostics
            continue
        if read is None:
            explained = f"; meshwright explain {value}" if value in words() else ""
            found.append(
                Diagnostic(
                    code="W002",
                    message=f"{key} = {value!r} is not {wanted}",
                    place=f"{place} {key}={value}",
                    help=unseparated(value) or f"write {key}=<{wanted}>" + explained,
                )
            )
        elif name == "balance":
            values |= read
        elif name.startswith("lora."):
            lora[name[5:]] = read
        else:
            values[name] = read
    for key, name in (("batch", "global_batch"), ("seq", "seq_len")):
        if key not in given and not any(_READERS.get(k, ("",))[0] == name for k in given):
            if key == "seq" and given.keys() & {"image", "features"}:
                continue
            found.append(
                Diagnostic(
                    code="W003",
                    message=f"the workload does not say {key}",
                    place=f"{place} {text!r}",
                    help="for example batch=512,seq=8192, or of a network of convolutions batch=512,image=224",
                )
            )
    if lora and values.get("phase", "lora") != "lora":
        found.append(
            Diagnostic(
                code="W002",
                message=f"rank, targets, alpha and lora_dropout belong to phase=lora, not to phase={values['phase']}",
                place=f"{place} {text!r}",
                help="drop them or write phase=lora",
            )
        )
    found += fitted_lengths(values, place, base) + contradictions(values, place)
    if values.keys() & {"image", "features"}:
        values["seq_len"] = values.get("image", 1) ** 2
    if found:
        raise MeshwrightError(found)
    if lora or values.get("phase") == "lora":
        values |= {"phase": "lora", "lora": Lora(**lora)}
    return Train(**values)


def _count(value: str) -> int | None:
    read = parse_count(value, binary_k=True)
    return read if read is not None and 0 < read <= MAX_COUNT else None


def _side(value: str) -> int | None:
    read = _count(value)
    return read if read is not None and read <= MAX_SIDE else None


def _tokens(value: str) -> float | None:
    read = parse_count(value)
    return float(read) if read is not None and read > 0 else None


def _yes_no(value: str) -> bool | None:
    return {"yes": True, "true": True, "1": True, "on": True, "no": False, "false": False, "0": False}.get(
        value.lower()
    )


def _one_of(choices):
    return lambda value: value.lower() if value.lower() in choices else None


def _seed(value: str) -> int | None:
    return int(value) if value.isdecimal() and len(value) <= 9 else None


def _few(value: str) -> int | None:
    read = _count(value)
    return read if read is not None and 2 <= read <= 1000 else None


def _balance(value: str) -> dict[str, object] | None:
    """The fields that ``global:0.01+bias:0.001`` says: a loss, selection biases, or both."""
    out: dict[str, object] = {}
    for word in value.lower().split("+"):
        kind, colon, number = word.partition(":")
        read = _bound(number) if colon else BIAS_RATE if kind == SELECTION_BIAS else BALANCE_WEIGHT
        said = {"bias_rate": read} if kind == SELECTION_BIAS else {"balance": kind, "balance_weight": read}
        if kind not in (*BALANCES, SELECTION_BIAS) or read is None or out.keys() & said.keys():
            return None
        out |= said
    return out


def _bound(value: str, most: float = 100) -> float | None:
    try:
        read = float(value)
    except ValueError:
        return None
    return read if 0 < read <= most else None


def _part(value: str) -> float | None:
    return _bound(value, nextafter(1, 0))


_READERS = {
    "batch": ("global_batch", _count, "a positive number of sequences up to 1e9"),
    "global_batch": ("global_batch", _count, "a positive number of sequences up to 1e9"),
    "seq": ("seq_len", _count, "a positive number of tokens up to 1e9"),
    "seq_len": ("seq_len", _count, "a positive number of tokens up to 1e9"),
    "lengths": (
        "lengths",
        of_documents.read,
        "lengths with shares such as 512:0.5;2048:0.5, lognormal:mean=2048;sigma=1, or a .csv, .jsonl or .txt file",
    ),
    "pack": ("pack", _one_of(PACKS), f"one of {', '.join(PACKS)}"),
    "seed": ("seed", _seed, "a whole number from 0 up to 999999999"),
    "optimizer": ("optimizer", _one_of(OPTIMIZER_MOMENTS), f"one of {', '.join(OPTIMIZER_MOMENTS)}"),
    "dtype": ("dtype", _one_of(TRAINED_DTYPES), f"one of {', '.join(TRAINED_DTYPES)}"),
    "tokens": ("tokens", _tokens, "a number of tokens such as 15t"),
    "phase": ("phase", _one_of(PHASES), f"one of {', '.join(PHASES)}"),
    "rank": ("lora.rank", _count, "a positive rank up to 1e9"),
    "targets": ("lora.targets", read_targets, f"some of {'+'.join(LORA_TARGETS)}, or all"),
    "alpha": ("lora.alpha", read_alpha, "a number above 0 and up to 1e6"),
    "lora_dropout": ("lora.dropout", _part, "a part of one above 0 and below 1, such as 0.05"),
    "dropout": ("dropout", _yes_no, "yes or no"),
    "grow": ("grow", _bound, "a bound of the norm test, above 0 and up to 100"),
    "most": ("most", _count, "a positive number of sequences up to 1e9"),
    "align": ("align", _part, "a part of one above 0 and below 1, such as 0.97"),
    "adversarial": ("adversarial", _part, "a part of the embeddings' length above 0 and below 1, such as 0.05"),
    "routing": ("routing", read_routing, "zipf:s=1.2 (with ;affinity= and ;near=), or a .json file"),
    "balance": (
        "balance",
        _balance,
        "micro or global (with a weight: global:0.01), bias (with a step: bias:0.001), or global+bias",
    ),
    "locality": ("locality", _bound, "the weight of the loss, above 0 and up to 100"),
    "clusters": ("clusters", _few, "a number of clusters from 2 up to 1000"),
    "causal": ("causal", _yes_no, "yes or no"),
    "frames": ("frames", _count, "a positive number of frames up to 1e9"),
    "features": ("features", _count, "numbers of a sample, up to 1e9"),
    "image": ("image", _side, f"pixels along a side, up to {MAX_SIDE:,}"),
}
#: Keys whose values may be files, which lie in a folder.
FILES = ("lengths", "routing")
#: Keys that a workload may say.
KEYS = tuple(_READERS)
