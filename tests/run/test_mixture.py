"""Mixtures of texts in their shares, tables that datasets saves, and tokens of datatrove."""

import json
import os
import random
import signal
import struct
import time
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import data, launch, loop
from meshwright.run.data import tokenizer
from meshwright.run.data.mixture import turns
from meshwright.run.settings import Settings
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from tests.run.test_chat import WORDS
from tests.run.test_chat import model as chat_model
from tests.run.test_chat import written as chats

LETTERS = "abc"


def shares(weights):
    return tuple(w / sum(weights) for w in weights)


MANY = st.lists(st.integers(1, 1000), min_size=1, max_size=6).map(shares)


@given(weights=MANY, count=st.integers(1, 400))
def test_after_any_number_of_sequences_each_text_has_had_its_share(weights, count):
    """Within (1 + k w) / 2 of n w, by the rounding of a text's own times and of all of theirs."""
    found = turns(weights, 0, count)
    had = np.cumsum(found.source[:, None] == np.arange(len(weights)), 0)
    places = np.arange(1, count + 1)[:, None]
    far = np.abs(had - places * np.array(weights))
    assert (far <= (1 + len(weights) * np.array(weights)) / 2 + 1e-9).all()
    for at in range(len(weights)):  # each in its own order, none left out
        mine = found.number[found.source == at]
        assert mine.tolist() == list(range(len(mine)))


@given(weights=MANY, first=st.integers(0, 10**6), count=st.integers(1, 50))
def test_turns_are_the_same_wherever_one_begins(weights, first, count):
    whole = turns(weights, max(0, first - 30), count + 30)
    skip = first - max(0, first - 30)
    for ours, theirs in zip(turns(weights, first, count), whole):
        assert ours.tolist() == theirs[skip : skip + count].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of documents of one letter each: a in .jsonl, b in .parquet, c in text; `b` has the least."""
    base = tmp_path_factory.mktemp("mixture")
    (base / "a.jsonl").write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in range(20, 60)))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["".join(f"b{i % 10}" for i in range(n, n + 20)) for n in (1, 24, 47)]}),
        base / "b.parquet",
    )
    (base / "c.txt").write_text("c" * 900)
    return base


def corpus(folder, weights, cache, **train):
    name = ",".join(f"{folder / file}={weight}" for file, weight in weights.items())
    built = data.build(name, tokenizer.Bytes(), cache)
    asked = Train(**({"global_batch": 8, "seq_len": 16} | train))
    return data.load(built, asked, vocab=257, seed=3)


def letters(batch):
    """Which text each row is of, by the letter that it has most of."""
    return [LETTERS[int(np.argmax([(row == ord(c)).sum() for c in LETTERS]))] for row in batch.tokens.numpy()]


WEIGHTS = {"a.jsonl": "0.5", "b.parquet": "0.3", "c.txt": "0.2"}


def test_a_mixture_has_each_text_in_its_share_and_starts_a_short_one_again(folder, tmp_path):
    mixed = corpus(folder, WEIGHTS, tmp_path)
    seen = [letter for step in range(25) for letter in letters(mixed.batch(step))]
    assert [seen.count(c) for c in LETTERS] == [100, 60, 40]
    # b has 7 sequences of 16 (3 x 41 tokens, less one): each is seen once an epoch, 60 in 8 epochs and 4 sequences
    rows = [row for step in range(25) for row in mixed.batch(step).tokens.numpy() if ord("b") in row]
    times = Counter(tuple(row.tolist()) for row in rows)
    assert sorted(times.values()) == [8] * 3 + [9] * 4


@pytest.mark.parametrize("pack", ["", "packed"])
def test_all_ranks_together_have_the_batch_of_one(pack, folder, tmp_path):
    mixed = corpus(folder, WEIGHTS, tmp_path, pack=pack, seq_len=64 if pack else 16)
    whole, parts = mixed.batch(5), [mixed.batch(5, rank, 4) for rank in range(4)]
    for column, of_all in enumerate(whole[:4]):
        if of_all is not None:
            assert torch.equal(torch.cat([part[column] for part in parts]), of_all)
    assert {part.num_targets for part in parts} == {whole.num_targets}
    if pack:
        assert whole.num_targets == int((whole.targets >= 0).sum())


def test_conversations_and_text_are_learnt_as_each_is_alone(tmp_path):
    words = chat_model(tmp_path / "model")
    (tmp_path / "t.txt").write_text("hi there how are you fine bye " * 20)
    made = data.build(f"{chats(tmp_path)}=1,{tmp_path / 't.txt'}=1", tokenizer.load(words), tmp_path / "cache")
    batch = data.load(made, Train(global_batch=8, seq_len=4), vocab=len(WORDS)).batch(0)
    plain = (batch.targets >= 0).all(1)
    assert int(plain.sum()) == 4  # every token of the text has its next one for a target
    assert torch.equal(batch.targets[plain], batch.tokens[plain][:, 1:])
    assert batch.num_targets == int((batch.targets >= 0).sum()) < 32


def test_a_part_of_every_text_is_held_out(folder, tmp_path):
    train, judged = data.held_out(corpus(folder, WEIGHTS, tmp_path), 0.25)
    assert set(letters(judged.batch(0))) <= set(LETTERS) and judged.weights == train.weights
    with pytest.raises(ValueError, match="held out"):
        data.held_out(corpus(folder, WEIGHTS, tmp_path), 0.01)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.txt=0.7,b.txt=-0.3", ["the weight -0.3 is not above 0"]),
        ("a.txt=0,b.txt=x,c.txt", ["the weight 0 is not above 0", "'x' is no number", "'c.txt' has no weight"]),
        ("a.txt=1,a.txt=2", ["a.txt is named twice"]),
        ("a.txt=1e12,b.txt=1", ["too far apart"]),
    ],
)
def test_a_mixture_that_cannot_be_says_everything_that_is_wrong(name, said, tmp_path):
    with pytest.raises(MeshwrightError) as caught:
        data.build(name, tokenizer.Bytes(), tmp_path)
    assert [d.code for d in caught.value.diagnostics] == ["D009"] * len(said)
    assert all(part in d.message and d.place.startswith("--data ") for d, part in zip(caught.value.diagnostics, said))


def test_rows_of_a_whole_batch_and_texts_without_a_sequence_are_refused(folder, tmp_path):
    with pytest.raises(MeshwrightError, match=r"D009.*pack=balanced lays out one text"):
        corpus(folder, WEIGHTS, tmp_path, pack="balanced", seq_len=64)
    with pytest.raises(MeshwrightError, match="D005") as caught:
        corpus(folder, WEIGHTS, tmp_path, seq_len=512)
    assert "b.parquet" in caught.value.diagnostics[0].place


def test_a_file_whose_name_has_an_equals_sign_is_itself(tmp_path):
    (tmp_path / "lr=0.1,x.txt").write_text("hello " * 40)
    built = data.build(str(tmp_path / "lr=0.1,x.txt"), tokenizer.Bytes(), tmp_path / "cache")
    assert data.load(built, Train(global_batch=2, seq_len=16), vocab=257).tokens[0] == ord("h")


# --- going on --------------------------------------------------------------------------------------------------------

MODEL = transformer(layers=1, hidden=32, heads=2, vocab=257, ffn=32, gated=True, max_seq_len=16)


def job(folder, weights, cache, out, **said):
    name = ",".join(f"{folder / file}={weight}" for file, weight in weights.items())
    built = data.build(name, tokenizer.Bytes(), cache)
    train = Train(global_batch=4, seq_len=16, dtype="fp32")
    how = {"settings": Settings(lr=1e-2), "steps": 24, "save_every": 4, "quiet": True, "corpus": str(built)}
    return loop.Job(model=MODEL, plan=parse("dp1"), train=train, **(how | {"out": out} | said))


def trained(asked):
    return launch.start(loop.train, asked, num_ranks=1, device="cpu", stops=True)["losses"]


def begins(asked):
    """A process of its own that trains, and does not end by itself."""
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            trained(asked)
        finally:
            os._exit(0)
    return child


def test_a_stream_of_parquet_goes_on_at_the_exact_token_after_kill_9(folder, tmp_path):
    """Losses to the last bit are those of a run that nobody killed, so that every step had its own tokens; twice, at
    instants that are drawn, with another text beside the table the second time."""
    draw = random.Random(4)
    for number, weights in enumerate([{"b.parquet": "1"}, WEIGHTS]):
        out = tmp_path / str(number)
        whole = trained(job(folder, weights, tmp_path / "cache", ""))
        child = begins(job(folder, weights, tmp_path / "cache", str(out), steps=10_000))
        while not list(out.glob("step-*")):
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reached = max(int(one.name[5:13]) for one in out.glob("step-*"))
        assert 0 < reached < 10_000
        steps = max(24, reached + 5)
        if steps > len(whole):
            whole = trained(job(folder, weights, tmp_path / "cache", "", steps=steps))
        rest = trained(job(folder, weights, tmp_path / "cache", str(out), resume=True, steps=steps))
        assert rest == whole[reached:]


# --- tables ----------------------------------------------------------------------------------------------------------


def saved(folder, table, parts=2, **state):
    """A data set as ``datasets.save_to_disk`` leaves it: streams of Arrow, and a state that names them."""
    folder.mkdir(parents=True)
    names, step = [], -(-len(table) // parts)
    for number in range(parts):
        names.append(f"data-{number:05d}-of-{parts:05d}.arrow")
        with pyarrow.OSFile(str(folder / names[-1]), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table.slice(number * step, step))
    said = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"} | state
    (folder / "state.json").write_text(json.dumps(said))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def tokens(name, cache, words="bytes"):
    built = data.build(str(name), tokenizer.load(words), cache)
    return data.load(built, Train(global_batch=1, seq_len=4), vocab=257).tokens.tolist()


def test_a_saved_data_set_has_the_tokens_of_its_text(tmp_path):
    texts = ["first", "second one", "third", "the last of them"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    plain = tokens(tmp_path / "t.jsonl", tmp_path / "cache")
    table = pyarrow.table({"id": [1, 2, 3, 4], "text": texts})
    assert tokens(saved(tmp_path / "one", table), tmp_path / "cache") == plain
    saved(tmp_path / "both" / "train", table)
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert tokens(tmp_path / "both", tmp_path / "cache") == plain
    renamed = saved(tmp_path / "body", table.rename_columns(["id", "body"]))
    assert tokens(f"{renamed}#body", tmp_path / "cache") == plain
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    assert tokens(tmp_path / "file.arrow", tmp_path / "cache") == plain


def test_conversations_in_a_saved_data_set_are_those_of_its_lines(tmp_path):
    words = chat_model(tmp_path / "model")
    lines = [json.loads(line) for line in chats(tmp_path).read_text().splitlines()]
    folder = saved(tmp_path / "chats", pyarrow.table({"messages": [line["messages"] for line in lines]}))
    assert tokens(folder, tmp_path / "cache", words) == tokens(tmp_path / "talks.jsonl", tmp_path / "cache", words)


def test_a_data_set_that_is_none_is_one_error(tmp_path):
    table = pyarrow.table({"text": ["x"]})
    for name, change, said in (
        ("gone", {"_data_files": [{"filename": "absent.arrow"}]}, "which is not in it"),
        ("out", {"_data_files": [{"filename": "../t.arrow"}]}, "which is not in it"),
        ("rows", {"_indices_data_files": [{"filename": "indices.arrow"}]}, "selection of rows"),
        ("bad", {"_data_files": 3}, "not a saved data set"),
    ):
        with pytest.raises(MeshwrightError, match=f"D001.*{said}"):
            tokens(saved(tmp_path / name, table, **change), tmp_path / "cache")
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(MeshwrightError, match="its splits are a, b"):
        tokens(tmp_path / "splits", tmp_path / "cache")
    (tmp_path / "torn.arrow").write_bytes(b"\x00" * 40)
    with pytest.raises(MeshwrightError, match=r"D001.*not an Arrow file"):
        tokens(tmp_path / "torn.arrow", tmp_path / "cache")


# --- datatrove -------------------------------------------------------------------------------------------------------


def ds(file, documents, kind="H", learnt=None):
    """Files as datatrove's ``TokenizedFile`` packs them: ids, ends of documents as uint64, a byte each of what is
    learnt."""
    ids = [one for document in documents for one in document]
    ends = np.cumsum([len(document) for document in documents]).tolist()
    file.write_bytes(struct.pack(f"<{len(ids)}{kind}", *ids))
    file.with_name(f"{file.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if learnt is not None:
        file.with_name(f"{file.name}.loss").write_bytes(struct.pack(f"<{len(learnt)}?", *learnt))
    return file


@pytest.mark.parametrize("kind", ["H", "I"])
def test_tokens_of_datatrove_give_the_batches_of_their_text(kind, tmp_path):
    texts = ["hello there", "you", "and a third one, which is longer"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    ids = [[*text.encode(), 256] for text in texts]
    (tmp_path / "folder").mkdir()
    ds(tmp_path / "folder" / "0.ds", ids[:1], kind)
    ds(tmp_path / "folder" / "1.ds", ids[1:], kind)
    names = tmp_path / "t.jsonl", ds(tmp_path / "all.ds", ids, kind), tmp_path / "folder"
    found = []
    for name in names:
        built = data.build(str(name), tokenizer.Bytes(), tmp_path / "cache")
        found.append(data.load(built, Train(global_batch=2, seq_len=8), vocab=257).batch(0))
    for other in found[1:]:
        assert torch.equal(other.tokens, found[0].tokens) and torch.equal(other.documents, found[0].documents)


def test_a_mask_of_datatrove_says_what_is_learnt(tmp_path):
    learnt = [False, True, True, False, True, True, False, True, True]
    file = ds(tmp_path / "m.ds", [list(range(9))], learnt=learnt)
    built = data.build(str(file), tokenizer.Bytes(), tmp_path / "cache")
    batch = data.load(built, Train(global_batch=1, seq_len=8), vocab=257).batch(0)
    assert batch.targets.tolist() == [[i if learnt[i] else -1 for i in range(1, 9)]]
    assert batch.num_targets == sum(learnt[1:])


def test_tokens_that_their_index_does_not_describe_are_refused(tmp_path):
    file = ds(tmp_path / "t.ds", [[1, 2, 3]])
    os.truncate(file, 5)
    with pytest.raises(MeshwrightError, match=r"D007.*5 bytes, and the index says 3 ids"):
        data.build(str(file), tokenizer.Bytes(), tmp_path / "cache")
    (tmp_path / "t.ds.index").write_bytes(b"123")
    with pytest.raises(MeshwrightError, match=r"D007.*no whole numbers of 8"):
        data.build(str(file), tokenizer.Bytes(), tmp_path / "cache")
    (tmp_path / "t.ds.index").unlink()
    with pytest.raises(MeshwrightError, match="D001"):
        data.build(str(file), tokenizer.Bytes(), tmp_path / "cache")
