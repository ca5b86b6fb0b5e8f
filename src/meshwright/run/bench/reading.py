"""How fast this machine reads text: documents from files, tokens from documents, batches from tokens.

Times are seconds of one core: those of the processor while documents are tokenised, whose library takes all cores. What
is read has been read before, so that it comes from memory: a source's own rate is another word of a feed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec

from meshwright.run.data import Corpus, MixedText, documents, load
from meshwright.run.data.tokenizer import Tokenizer
from meshwright.spec.workload import Train

#: Batches that are timed at most, and seconds for which they, or documents, are.
BATCHES, LONG_S = 200, 0.5
#: Documents that are read.
DOCUMENTS = 4096


class ReadingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of reading a text: its ``text_bytes`` for each token, and seconds of a core for a token: to decode the
    file (``decode_s``), to tokenise (``tokenise_s``) and to put batches together (``collate_s``). ``documents`` and
    ``tokens`` were measured."""

    documents: int
    tokens: int
    text_bytes: float
    decode_s: float
    tokenise_s: float
    collate_s: float

    def words(self) -> str:
        """Return them as words of ``--feed``, of a loader that tokenises as it goes."""
        stages = (("decode", self.decode_s), ("tokenise", self.tokenise_s), ("collate", self.collate_s))
        said = [f"sample={self.text_bytes:.3g}B/token"]
        return ",".join(said + [f"{stage}={seconds * 1e9:.4g}ns/token" for stage, seconds in stages if seconds > 0])


def batch_s(make: Callable[[int], object], first: int = 0) -> float:
    """Return the seconds that making one batch takes, in the mean of those of some steps after the ``first``, which
    is not counted."""
    make(first)
    begun, count = time.perf_counter(), 0
    while count < BATCHES and (time.perf_counter() - begun < LONG_S or not count):
        count += 1
        make(first + count)
    return (time.perf_counter() - begun) / count


def measure(name: str, tokenizer: Tokenizer, folder: Path, train: Train, *, vocab: int) -> ReadingFigures:
    """Measure the reading of the text `name`, whose tokens are in the `folder` of a corpus, in batches of `train`.

    Raises:
        MeshwrightError: D codes for what cannot be read, and for text that does not fill a batch.
    """
    found = documents.files(name)
    for _ in islice(documents.documents(found), DOCUMENTS):
        pass  # from the disk to memory
    begun = time.process_time()
    texts = [b"".join(blocks) for blocks in islice(documents.documents(found), DOCUMENTS)]
    decoded = time.process_time() - begun
    begun = time.process_time()
    tokens = sum(1 + sum(len(ids) for ids in runs) for runs in tokenizer.encode(iter([text]) for text in texts))
    tokenised = time.process_time() - begun
    corpus: Corpus | MixedText = load(folder, train, vocab=vocab, place=f"--text {name}")
    made = batch_s(corpus.batch)
    return ReadingFigures(
        documents=len(texts),
        tokens=tokens,
        text_bytes=sum(map(len, texts)) / tokens,
        decode_s=decoded / tokens,
        tokenise_s=tokenised / tokens,
        collate_s=made / train.tokens_per_step,
    )
