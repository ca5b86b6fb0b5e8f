"""A tokenised corpus while it is written: killed and gone on with, wanted by several, left behind."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.run import data
from meshwright.run.data import chat, growing, store, tokenizer


class Slow(tokenizer.Bytes):
    """Bytes, whose documents are counted in a file, and which stands still at one of them."""

    def __init__(self, counts, stops=None):
        self.counts, self.stops = counts, stops

    def encode(self, documents):
        for number, blocks in enumerate(super().encode(documents)):
            if number == self.stops:
                time.sleep(60)
            with self.counts.open("a") as file:
                file.write("x")
            yield blocks


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "t.jsonl"
    lines = [{"text": "" if n % 7 == 3 else chr(97 + n % 26) * (n + 1)} for n in range(40)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def built_aside(text, cache, how):
    child = os.fork()
    if child == 0:
        try:
            data.build(str(text), how, cache)
        finally:
            os._exit(0)
    return child


def files_of(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_a_build_that_is_killed_goes_on_behind_its_last_note(text, tmp_path, monkeypatch):
    whole = files_of(data.build(str(text), tokenizer.Bytes(), tmp_path / "other"))
    monkeypatch.setattr(growing, "EVERY", 100)
    counts, cache = tmp_path / "counts", tmp_path / "cache"
    child = built_aside(text, cache, Slow(counts, stops=25))
    while not counts.exists() or counts.stat().st_size < 25:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = cache.iterdir()
    noted = json.loads((left / growing.NOTE).read_bytes())
    assert left.name.startswith(growing.GROWING) and 0 < noted["read"] <= 25
    with (left / data.TOKENS).open("ab") as torn:  # what had been written behind the note
        torn.write(b"torn")
    counts.unlink()
    said = []
    folder = data.build(str(text), Slow(counts), cache, say=said.append)
    assert files_of(folder) == whole and list(cache.iterdir()) == [folder]
    assert counts.stat().st_size == 40 - noted["read"]
    assert said == [f"tokenising goes on behind {noted['tokens']:,} tokens of {noted['documents']:,} documents"]


def test_a_note_without_its_tokens_is_none(text, tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "EVERY", 1)
    monkeypatch.setattr(store, "_put", lambda temporary, folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        data.build(str(text), tokenizer.Bytes(), tmp_path / "cache")
    monkeypatch.undo()
    (left,) = (tmp_path / "cache").iterdir()
    (left / data.TOKENS).write_bytes(b"")
    whole = files_of(data.build(str(text), tokenizer.Bytes(), tmp_path / "other"))
    assert files_of(data.build(str(text), tokenizer.Bytes(), tmp_path / "cache")) == whole


def test_of_several_that_want_a_text_one_tokenises_it(text, tmp_path):
    counts, cache = tmp_path / "counts", tmp_path / "cache"
    children = [built_aside(text, cache, Slow(counts)) for _ in range(6)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    (folder,) = cache.iterdir()
    assert data.whole(folder) and counts.stat().st_size == 40


def test_who_waits_for_another_says_so(tmp_path):
    folder, held, heard = tmp_path / "f", tmp_path / "held", tmp_path / "heard"
    child = os.fork()  # before the lock is there: a lock is held by whoever has a copy of its open file
    if child == 0:
        while not held.exists():
            time.sleep(0.01)
        with growing.alone(folder, lambda: False, heard.write_text):
            os._exit(0)
    with growing.alone(folder, lambda: False, lambda line: None) as mine:
        held.touch()
        while not heard.exists() or not heard.read_text():
            time.sleep(0.01)
    assert os.waitpid(child, 0)[1] == 0
    assert mine and "waiting for it" in heard.read_text()


def test_conversations_go_on_too(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "encoded", lambda found, how, *, first=0: iter(CHATS[first:]))
    monkeypatch.setattr(chat, "chats", lambda found: found)
    monkeypatch.setattr(chat, "layout", lambda how: "")
    text, cache = tmp_path / "c.jsonl", tmp_path / "cache"
    text.write_text("{}\n")
    whole = files_of(data.build(str(text), tokenizer.Bytes(), tmp_path / "other"))
    assert np.frombuffer(whole[store.LEARNT], np.uint8).tolist() == [0, 1, 0, 1, 0, 1, 0]  # an end is not learnt
    monkeypatch.setattr(growing, "EVERY", 1)
    cut = [*CHATS[:2], None]  # what is there is noted, and the next fails as Ctrl-C would
    monkeypatch.setattr(chat, "encoded", lambda found, how, *, first=0: (interrupted(one) for one in cut))
    with pytest.raises(KeyboardInterrupt):
        data.build(str(text), tokenizer.Bytes(), cache)
    monkeypatch.setattr(chat, "encoded", lambda found, how, *, first=0: iter(CHATS[first:]))
    assert files_of(data.build(str(text), tokenizer.Bytes(), cache)) == whole


CHATS = [(np.array(ids, np.uint32), np.array(learnt)) for ids, learnt in (([1, 2], [0, 1]), ([3], [1]), ([4], [1]))]


def interrupted(one):
    if one is None:
        raise KeyboardInterrupt
    return one


def test_what_was_left_a_week_ago_is_removed_and_what_is_written_now_is_not(text, tmp_path):
    cache, old = tmp_path / "cache", time.time() - growing.FORGOTTEN_S - 60
    for name in (".growing-old", ".building-old", ".growing-held", ".growing-new"):
        folder = cache / name
        folder.mkdir(parents=True)
        (folder / growing.LOCK).touch()
        if "new" not in name:
            for path in (folder / growing.LOCK, folder):
                os.utime(path, (old, old))
    with growing.alone(cache / ".growing-held", lambda: False, lambda line: None):
        for path in (cache / ".growing-held" / growing.LOCK, cache / ".growing-held"):
            os.utime(path, (old, old))
        data.build(str(text), tokenizer.Bytes(), cache)
    assert sorted(f.name for f in cache.iterdir() if f.name.startswith(".")) == [".growing-held", ".growing-new"]


def test_a_full_disk_leaves_nothing_of_it(text, tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(growing, "EVERY", 1)
    monkeypatch.setattr(growing.Growing, "keep", full)
    with pytest.raises(MeshwrightError, match="No space left on device") as caught:
        data.build(str(text), tokenizer.Bytes(), tmp_path / "cache")
    assert [d.code for d in caught.value.diagnostics] == ["X104"] and list((tmp_path / "cache").iterdir()) == []
