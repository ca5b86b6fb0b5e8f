"""Tokenised corpora on disk: built once for each content, tokenizer and template, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError
from meshwright.run.data import chat, documents, indexed, labelled, named, nanotron
from meshwright.run.data.growing import BUILDING, GROWING, LOCK, NOTE, Growing, alone, sweep
from meshwright.run.data.tokenizer import Tokenizer

#: Of the files of a tokenised corpus; part of its key, so that another version builds another.
FORMAT_VERSION = 1
TOKENS, STARTS, LEARNT, META, MIXTURE = "tokens.bin", "starts.bin", "learnt.bin", "meta.json", "mixture.json"
#: Bytes that are copied at a time.
BLOCK = 1 << 24


class CorpusMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a tokenised corpus: numbers of tokens and documents, the largest id, and bytes per token. ``file``:
    where the tokens lie that others have written, of the numpy type ``kind``; "" for a file beside this header.
    ``chats``: of conversations, with a byte a token that says whether it is learnt."""

    num_tokens: int
    num_documents: int
    largest: int
    width: int
    file: str = ""
    kind: str = ""
    chats: bool = False

    def tokens(self, folder: Path) -> tuple[Path, np.dtype[Any]]:
        """The file of the tokens, and their type."""
        if self.file:
            return Path(self.file), np.dtype(self.kind)
        return folder / TOKENS, np.dtype(f"<u{self.width}")


class MixedCorpus(msgspec.Struct, frozen=True, kw_only=True):
    """A text of a mixture: its name, the folder of its corpus in the same cache, and its share of the sequences."""

    name: str
    folder: str
    share: float


class MixtureMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a mixture of corpora that are each there."""

    sources: tuple[MixedCorpus, ...]


def silent(line: str) -> None:
    """Say nothing."""


def build(name: str, tokenizer: Tokenizer, cache: Path, *, say: Callable[[str], None] = silent) -> Path:
    """The folder of the tokenised corpus of `name` in `cache`: built when it is not there whole, else left alone.

    The key is the contents of the files and the tokenizer; tokens that are there already (:mod:`.indexed`) stay where
    they are. A folder appears whole or not at all. Text is tokenised as it is read, and a build that was killed goes on
    (:mod:`.growing`); `say` is told how far it is.

    Raises:
        MeshwrightError: D001, D002, D003, D007, D012 for what cannot be read; D009 for a mixture that is none; X104
            when the cache cannot be written.
    """
    mixed, sampled = named.mixture(name), labelled.samples(name)
    there = [] if mixed or sampled else _tokens(name)
    if sampled:
        write, key = partial(_write_samples, name=name), f"labelled {labelled.digest(name)} {labelled.FORMAT_VERSION}"
    elif mixed:
        built = [
            MixedCorpus(name=one.name, folder=build(one.name, tokenizer, cache, say=say).name, share=one.share)
            for one in mixed
        ]
        said = msgspec.json.encode(MixtureMeta(sources=tuple(built)))
        write, key = partial(_write_mixture, said=said), f"mixture {said.decode()} {FORMAT_VERSION}"
    elif there:
        write, key = partial(_write_ready, there=there), f"indexed {_digest_of(there)} {FORMAT_VERSION}"
    else:
        return _grown(documents.files(name), tokenizer, cache, say)
    folder = cache / _short(key)
    if whole(folder):
        return folder
    temporary = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix=BUILDING))
        write(temporary)
        _put(temporary, folder)
    except OSError as error:
        if not whole(folder):  # else another process was first
            raise _unwritten(error, cache) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def look(name: str) -> None:
    """Look whether there is a text of that name; nothing of it is read.

    Raises:
        MeshwrightError: D001, D009 as :func:`build` has them for what no file goes by.
    """
    mixed = named.mixture(name)
    for one in mixed:
        look(one.name)
    if labelled.samples(name):
        labelled.look(name)
        return
    both = None if mixed else indexed.pair(name)
    if both is not None:
        indexed.look(*both)
    elif not mixed and not nanotron.tokens(name):
        documents.files(name)


def _grown(found: list[documents.TextFile], tokenizer: Tokenizer, cache: Path, say: Callable[[str], None]) -> Path:
    """The folder of some text's tokens."""
    key, talks = f"{documents.digest(found)} {tokenizer.identity} {FORMAT_VERSION}", chat.chats(found)
    key += f" {chat.layout(tokenizer)}" if talks else ""
    folder, growing = cache / _short(key), cache / f"{GROWING}{_short(key)}"
    if whole(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache)
        with alone(growing, lambda: whole(folder), say) as mine:
            if mine:
                _write(growing, talks or found, tokenizer, say, chats=bool(talks))
                _put(growing, folder)
                for name in (LOCK, NOTE):
                    (folder / name).unlink(missing_ok=True)
    except OSError as error:
        shutil.rmtree(growing, ignore_errors=True)
        if not whole(folder):
            raise _unwritten(error, cache) from None
    except MeshwrightError:  # text that is mended is another text
        shutil.rmtree(growing, ignore_errors=True)
        raise
    return folder


def _put(temporary: Path, folder: Path) -> None:
    """Let what is whole take its place."""
    if folder.exists() and not whole(folder):  # cut short by a full disk or a hand
        shutil.rmtree(folder)
    temporary.rename(folder)


def _unwritten(error: OSError, cache: Path) -> MeshwrightError:
    return MeshwrightError.one(
        "X104",
        f"cannot write the tokenised corpus: {error.strerror or error}",
        place=str(cache),
        help="set XDG_CACHE_HOME to a folder that may be written to and has room",
    )


def digest(name: str) -> str:
    """A hash of the contents of what `name` means, whatever it is called and wherever it lies.

    Raises:
        MeshwrightError: D001, D007 for what cannot be read.
    """
    mixed = named.mixture(name)
    if mixed:
        return _sha(" ".join(f"{digest(one.name)} {one.share!r}" for one in mixed))
    if labelled.samples(name):
        return labelled.digest(name)
    there = _tokens(name)
    return _digest_of(there) if there else documents.digest(documents.files(name))


def _tokens(name: str) -> list[indexed.IndexedTokens]:
    """Tokens that others have written, [] where a name means text."""
    both = indexed.pair(name)
    if both is not None:
        return [indexed.read(*both)]
    return [nanotron.read(file) for file in nanotron.tokens(name)]


def _digest_of(there: list[indexed.IndexedTokens]) -> str:
    return there[0].digest if len(there) == 1 else _sha(" ".join(one.digest for one in there))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _short(key: str) -> str:
    return _sha(key)[:32]


def _write_samples(folder: Path, name: str) -> None:
    labelled.write(folder, labelled.read(name))


def _write_mixture(folder: Path, said: bytes) -> None:
    with (folder / MIXTURE).open("wb") as file:
        file.write(said)
        _flush(file)


def _write_ready(folder: Path, there: list[indexed.IndexedTokens]) -> None:
    """Write what is known of tokens that lie elsewhere in one file; of those in several, and of what is learnt of them,
    a copy."""
    if len(there) == 1 and there[0].learnt is None:
        _write_header(folder, there[0])
        return
    kind = max((np.dtype(one.kind) for one in there), key=lambda kind: kind.itemsize)
    masked, starts, count = any(one.learnt for one in there), [], 0
    with (folder / TOKENS).open("wb") as file, (folder / LEARNT).open("wb") as marks:
        for one in there:
            starts.append(one.starts + count)
            count += one.num_tokens
            for begin in range(0, one.num_tokens, BLOCK):
                part = slice(begin, begin + BLOCK)
                some = np.memmap(one.file, one.kind, "r")[part]
                file.write(some.astype(kind).tobytes())
                learnt = np.ones(len(some)) if one.learnt is None else np.memmap(one.learnt, np.uint8, "r")[part] > 0
                marks.write(learnt.astype(np.uint8).tobytes() if masked else b"")
        _flush(file)
        _flush(marks)
    meta = CorpusMeta(
        num_tokens=count,
        num_documents=sum(map(len, starts)),
        largest=max(one.largest() for one in there if one.num_tokens),
        width=kind.itemsize,
        chats=masked,
    )
    _write_about(folder, np.concatenate(starts), meta)


def _write_header(folder: Path, ready: indexed.IndexedTokens) -> None:
    """Write what is known of tokens that lie elsewhere."""
    meta = CorpusMeta(
        num_tokens=ready.num_tokens,
        num_documents=len(ready.starts),
        largest=ready.largest(),
        width=np.dtype(ready.kind).itemsize,
        file=str(ready.file),
        kind=ready.kind,
    )
    _write_about(folder, ready.starts, meta)


def _write_about(folder: Path, starts: NDArray[np.int64], meta: CorpusMeta) -> None:
    with (folder / STARTS).open("wb") as file:
        file.write(starts.astype("<i8").tobytes())
        _flush(file)
    _write_meta(folder, meta)


def _write_meta(folder: Path, meta: CorpusMeta) -> None:
    with (folder / META).open("wb") as file:
        file.write(msgspec.json.encode(meta))
        _flush(file)


def _write(
    folder: Path, found: list[documents.TextFile], tokenizer: Tokenizer, say: Callable[[str], None], *, chats: bool
) -> None:
    """Tokenise some text, from where a build before this one was to its end."""
    width = 2 if tokenizer.num_tokens <= 1 << 16 else 4
    to = Growing(folder, (TOKENS, STARTS, LEARNT), width, chats=chats, say=say)
    try:
        if chats:
            for ids, learnt in chat.encoded(found, tokenizer, first=to.note.read):
                to.add(iter([ids]), tokenizer.end, learnt)
        else:
            for document in tokenizer.encode(islice(documents.documents(found), to.note.read, None)):
                to.add(document, tokenizer.end)
    except KeyboardInterrupt:
        to.keep()
        raise
    finally:
        to.close()
    made = to.note
    numbers = {"num_tokens": made.tokens, "num_documents": made.documents, "largest": made.largest}
    _write_meta(folder, CorpusMeta(**numbers, width=width, chats=chats))


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def whole(folder: Path) -> bool:
    """Whether a folder holds a tokenised corpus or labelled samples of the sizes that it says, or a mixture of such
    folders beside it."""
    try:
        if (folder / labelled.META).is_file():
            return labelled.whole(folder)
        if (folder / MIXTURE).is_file():
            mixed = msgspec.json.decode((folder / MIXTURE).read_bytes(), type=MixtureMeta)
            return all(whole(folder.parent / source.folder) for source in mixed.sources)
        meta = msgspec.json.decode((folder / META).read_bytes(), type=CorpusMeta)
        sizes = {meta.tokens(folder)[0]: meta.num_tokens * meta.width, folder / STARTS: meta.num_documents * 8}
        sizes |= {folder / LEARNT: meta.num_tokens} if meta.chats else {}
        return all(file.stat().st_size == size for file, size in sizes.items())
    except (OSError, msgspec.MsgspecError):
        return False
