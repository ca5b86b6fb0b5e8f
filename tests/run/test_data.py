"""The corpus: the same tokens whatever the plan, each once an epoch, boundaries between documents, clear errors."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.errors import MeshwrightError
from meshwright.run import data
from meshwright.run.data import documents, tokenizer
from meshwright.spec.workload import Train, parse


def corpus(tmp_path, texts, *, seq=8, batch=2, vocab=257, name="t.jsonl", words="bytes", **more):
    path = tmp_path / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    else:
        path.write_text(texts)
    folder = data.build(str(path), tokenizer.load(words), tmp_path / "cache")
    return data.load(folder, Train(global_batch=batch, seq_len=seq), vocab=vocab, **more)


def refused(call, *args, **kwargs):
    with pytest.raises(MeshwrightError) as error:
        call(*args, **kwargs)
    return error.value.diagnostics


def test_bytes_are_themselves_and_a_document_ends_with_256(tmp_path):
    made = corpus(tmp_path, ["hello", "wörld"], seq=4, batch=1)
    assert made.tokens.tolist() == [*b"hello", 256, *"wörld".encode(), 256]
    assert made.starts.tolist() == [0, 6]


def test_targets_are_the_next_token_and_sequences_touch(tmp_path):
    text = "abcdefghijklmnopqrstuvwxyz"
    made = corpus(tmp_path, text, seq=5, batch=5, name="t.txt")
    rows = made.batch(0).tokens.tolist()
    assert sorted(bytes(r).decode() for r in rows) == ["abcdef", "fghijk", "klmnop", "pqrstu", "uvwxyz"]


def test_documents_are_numbered_within_their_sequence_and_the_end_belongs_to_its_document(tmp_path):
    # 3 + end, 4 + end, 1 + end, 5 + end: "aaa." "bbbb." "c." "ddddd." = 17 tokens, two sequences of 8
    made = corpus(tmp_path, ["aaa", "bbbb", "c", "ddddd"], seq=8, batch=2)
    batch = made.batch(0)
    by_first = {int(t[0]): d.tolist() for t, d in zip(batch.tokens, batch.documents)}
    assert by_first == {ord("a"): [0, 0, 0, 0, 1, 1, 1, 1], 256: [0, 1, 1, 2, 2, 2, 2, 2]}
    assert batch.tokens.dtype == torch.int64
    assert batch.documents.dtype == torch.int32


def test_one_document_or_no_boundaries_say_no_documents(tmp_path):
    assert corpus(tmp_path, "a" * 40, name="t.txt").batch(0).documents is None
    assert corpus(tmp_path, ["a" * 20, "b" * 20], boundaries=False).batch(0).documents is None


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_the_global_batch_is_the_same_whatever_dp_is(dp, tmp_path):
    made = corpus(tmp_path, [chr(97 + i % 26) * (i % 13) for i in range(60)], seq=8, batch=6, seed=3)
    for step in (0, 1, 7, 40):
        parts = [made.batch(step, i, dp) for i in range(dp)]
        whole = made.batch(step)
        assert torch.equal(torch.cat([p.tokens for p in parts]), whole.tokens)
        assert torch.equal(torch.cat([p.documents for p in parts]), whole.documents)


def test_a_batch_that_dp_does_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not divide by 3"):
        corpus(tmp_path, "a" * 40, name="t.txt", batch=2).batch(0, 0, 3)


def test_every_epoch_sees_every_sequence_once_in_another_order():
    epochs = [data.sequences(np.arange(e * 101, (e + 1) * 101), 101, seed=5).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(101)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    assert data.sequences(np.arange(101), 101, seed=6).tolist() != epochs[0]


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_permute_is_a_permutation(count, seed, epoch):
    assert np.array_equal(np.sort(data.permute(np.arange(count), count, (seed, epoch))), np.arange(count))


def test_permute_is_fair_by_the_chi_square_of_its_first_place():
    # 4,000 keys over 16 places: expected 250 each; P(chi2_15 > 37.7) = 0.001
    first = [int(data.permute(np.zeros(1, np.int64), 16, (key, 0))[0]) for key in range(4000)]
    seen = np.bincount(first, minlength=16)
    assert ((seen - 250) ** 2 / 250).sum() < 37.7


def test_an_enormous_corpus_is_ordered_without_memory():
    place = np.array([0, 1, 10**15])
    out = data.permute(place, 10**15 + 7, (1, 2))
    assert len(set(out.tolist())) == 3
    assert ((out >= 0) & (out < 10**15 + 7)).all()


def test_lengths_are_those_of_the_documents_with_their_ends(tmp_path):
    made = corpus(tmp_path, ["aaa", "bbbb", "c", "ddddd"], seq=8, batch=2)
    said = made.lengths()
    assert dict(zip(said.tokens, said.share)) == {2: 0.25, 4: 0.25, 5: 0.25, 6: 0.25}
    file = tmp_path / "lengths.csv"
    assert data.write_lengths(made, file) == 4
    read = parse(f"batch=2,seq=8,lengths={file}").lengths
    assert (read.tokens, read.share) == (said.tokens, said.share)


def test_a_corpus_is_built_once_and_by_its_content(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("same text")
    second.write_text("same text")
    one = data.build(str(first), tokenizer.Bytes(), tmp_path / "cache")
    made = (one / data.TOKENS).stat().st_mtime_ns
    assert data.build(str(second), tokenizer.Bytes(), tmp_path / "cache") == one
    assert (one / data.TOKENS).stat().st_mtime_ns == made
    second.write_text("another text")
    assert data.build(str(second), tokenizer.Bytes(), tmp_path / "cache") != one
    assert sorted(f.name for f in (tmp_path / "cache").iterdir() if f.name.startswith(".")) == []


def test_a_corpus_cut_short_is_built_again(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("x" * 100)
    folder = data.build(str(text), tokenizer.Bytes(), tmp_path / "cache")
    (folder / data.TOKENS).write_bytes(b"xx")
    assert not data.whole(folder)
    assert data.whole(data.build(str(text), tokenizer.Bytes(), tmp_path / "cache"))


def test_a_build_that_fails_leaves_nothing(tmp_path):
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "fine"}\n{"no": 1}\n')
    refused(data.build, str(text), tokenizer.Bytes(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_is_read_by_name_with_what_is_below(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n\n{"text": ""}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    read = [b"".join(d).decode() for d in documents.documents(documents.files(str(tmp_path)))]
    assert read == ["first", "second", "third", ""]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    assert [b"".join(d) for d in documents.documents([documents.TextFile(tmp_path / "a.txt")])] == [b"hi"]


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_characters_across_blocks_are_text_and_the_wrong_byte_is_named(block, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", block)
    file = tmp_path / "a.txt"
    file.write_bytes("aé€😀b".encode())
    assert b"".join(next(documents.documents([documents.TextFile(file)]))) == "aé€😀b".encode()
    file.write_bytes("aé€😀b".encode() + b"\xe9 latin")
    (found,) = refused(lambda: b"".join(next(documents.documents([documents.TextFile(file)]))))
    assert (found.code, found.message) == ("D002", "not UTF-8 text from byte 11 on")
    file.write_bytes("a€".encode()[:-1])
    assert (
        refused(lambda: b"".join(next(documents.documents([documents.TextFile(file)]))))[0].message
        == "not UTF-8 text from byte 1 on"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [("[1]", "it has no text"), ('{"text": 3}', "it has no text"), ("{", "not JSON"), ('{"text":"\\ud800"}', "half a")],
)
def test_a_line_without_a_text_is_named(line, said, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    (found,) = refused(lambda: [b"".join(d) for d in documents.documents([documents.TextFile(file)])])
    assert (found.code, found.place) == ("D003", f"{file}:2")
    assert said in found.message


def test_what_is_not_there_is_one_error(tmp_path):
    assert refused(documents.files, str(tmp_path / "absent"))[0].code == "D001"
    assert "no .txt" in refused(documents.files, str(tmp_path))[0].message


def test_too_little_text_says_how_much_is_needed(tmp_path):
    (found,) = refused(corpus, tmp_path, "a" * 30, name="t.txt", seq=8, batch=4)
    assert (found.code, found.place) == ("D005", "--data")
    assert "31 tokens fill 3 sequences of 8, and a step trains 4" in found.message
    assert "33 tokens are the least" in found.help
    assert corpus(tmp_path, "a" * 32, name="t.txt", seq=8, batch=4).num_sequences == 4


def test_ids_beyond_the_vocabulary_are_one_error(tmp_path):
    (found,) = refused(corpus, tmp_path, "a" * 40, name="t.txt", vocab=256)
    assert (found.code, found.message) == ("D006", "the text has token 256, and the model's vocabulary ends at 255")


def words(tmp_path, vocabulary, config=None):
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tmp_path.mkdir(exist_ok=True)
    made.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_tokenizer_json_is_used_with_the_end_it_names(tmp_path):
    folder = words(tmp_path / "t", ["?", "to", "be", "or", "not", "</s>"])
    made = corpus(tmp_path, ["to be or", "not to"], seq=2, batch=1, vocab=6, words=folder)
    assert made.tokens.tolist() == [1, 2, 3, 5, 4, 1, 5]


@pytest.mark.parametrize("together", [1, 9, 1 << 22])
def test_documents_encoded_together_stay_apart(together, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "TOGETHER", together)
    folder = words(tmp_path / "t", ["?", "to", "be", "or", "not", "</s>"])
    made = corpus(tmp_path, ["to be", "", "or", "not to be"], seq=2, batch=1, vocab=6, words=folder)
    assert made.tokens.tolist() == [1, 2, 5, 3, 5, 4, 1, 2, 5]
    assert made.starts.tolist() == [0, 3, 5]


def test_the_configuration_beside_a_tokenizer_says_its_end(tmp_path):
    vocabulary = ["?", "to", "</s>", "stop"]
    assert tokenizer.load(words(tmp_path / "a", vocabulary)).end == 2
    assert tokenizer.load(words(tmp_path / "b", vocabulary, {"eos_token": "stop"})).end == 3
    assert tokenizer.load(words(tmp_path / "c", vocabulary, {"eos_token": {"content": "stop"}})).end == 3


def test_other_tokenizers_make_other_corpora(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("to be")
    ends = [None, {"eos_token": "be"}]
    made = [tokenizer.load(words(tmp_path / f"t{i}", ["?", "to", "be", "</s>"], e)) for i, e in enumerate(ends)]
    folders = {data.build(str(text), t, tmp_path / "cache") for t in [*made, tokenizer.Bytes()]}
    assert len(folders) == 3


def test_tokenizers_that_cannot_be_used_are_one_error(tmp_path):
    assert refused(tokenizer.load, str(tmp_path / "absent.json"))[0].code == "D004"
    (tmp_path / "bad.json").write_text("{}")
    assert refused(tokenizer.load, str(tmp_path / "bad.json"))[0].message.startswith("not a tokenizer: ")
    (found,) = refused(tokenizer.load, words(tmp_path / "t", ["?", "to"]))
    assert "no token" in found.message
    assert "eos_token" in found.help


def test_the_sample_is_text_of_a_size_to_train_a_small_model(tmp_path):
    folder = data.build("sample", tokenizer.Bytes(), tmp_path)
    made = data.load(folder, Train(global_batch=8, seq_len=256), vocab=257)
    assert 30_000 < len(made.tokens) < 200_000
    assert len(made.starts) > 20


def indexed(folder, texts, kind=4, name="corpus", **wrong):
    """Tokens as Megatron-LM's preprocessing lays them, written here by hand, each document closed by 256 as
    ``--append-eod`` does."""
    ids = [[*t.encode(), 256] for t in texts]
    lengths = np.array([len(i) for i in ids], "<i4")
    flat = np.array([one for some in ids for one in some], data.indexed.KINDS[kind])
    begins = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype("<i8") * flat.itemsize
    said = {"magic": b"MMIDIDX\x00\x00", "version": 1, "code": kind, "lengths": lengths} | wrong
    firsts = np.arange(len(ids) + 1, dtype="<i8")
    head = said["magic"] + struct.pack("<QBQQ", said["version"], said["code"], len(ids), len(firsts))
    (folder / f"{name}.idx").write_bytes(head + said["lengths"].tobytes() + begins.tobytes() + firsts.tobytes())
    (folder / f"{name}.bin").write_bytes(flat.tobytes())
    return folder / name


@pytest.mark.parametrize("kind", [4, 8, 5])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_tokens_of_megatron_give_the_batches_of_their_text(kind, ending, tmp_path):
    texts = ["hello there", "w", "a longer one of them"]
    plain = corpus(tmp_path, texts, seq=4, batch=3)
    name = f"{indexed(tmp_path, texts, kind)}{ending}"
    folder = data.build(name, tokenizer.load("bytes"), tmp_path / "cache")
    assert sorted(f.name for f in folder.iterdir()) == ["meta.json", "starts.bin"]  # the tokens stay where they are
    made = data.load(folder, Train(global_batch=3, seq_len=4), vocab=257)
    for step in range(4):
        ours, theirs = made.batch(step), plain.batch(step)
        assert ours.tokens.equal(theirs.tokens) and ours.documents.equal(theirs.documents)
    assert data.digest(name) == data.digest(str(indexed(tmp_path, texts, kind, name="moved")))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"magic": b"MMIDIDY\x00\x00"}, "not an index"),
        ({"version": 2}, "version 2"),
        ({"code": 7}, "none of integers"),
        ({"lengths": np.array([3, 3], "<i4")}, "one behind the other"),
        ({"lengths": np.array([4, 9], "<i4")}, "bytes, and the index says"),
        ({"lengths": np.array([4], "<i4")}, "take"),
    ],
)
def test_an_index_that_does_not_fit_its_tokens_is_refused(wrong, said, tmp_path):
    name = indexed(tmp_path, ["abc", "de"], **wrong)
    (found,) = refused(data.build, str(name), tokenizer.load("bytes"), tmp_path / "cache")
    assert found.code == "D007" and said in found.message


def test_negative_ids_and_a_missing_half_are_refused(tmp_path):
    name = indexed(tmp_path, ["abc"])
    np.array([97, 98, -1, 256], "<i4").tofile(f"{name}.bin")
    (found,) = refused(data.build, str(name), tokenizer.load("bytes"), tmp_path / "cache")
    assert found.code == "D007" and "id -1 at place 2" in found.message
    (tmp_path / "corpus.idx").unlink()
    (found,) = refused(data.build, f"{name}.bin", tokenizer.load("bytes"), tmp_path / "cache")
    assert found.code == "D001" and found.place.endswith("corpus.idx")


def test_a_field_of_lines_is_taken_by_its_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "hello", "text": "other"}\n{"body": "w"}\n')
    folder = data.build(f"{tmp_path / 'a.jsonl'}#body", tokenizer.load("bytes"), tmp_path / "cache")
    made = data.load(folder, Train(global_batch=1, seq_len=4), vocab=257)
    assert made.tokens.tolist() == [*b"hello", 256, *b"w", 256]
    (tmp_path / "a.txt").write_text("plain")
    (found,) = refused(documents.files, f"{tmp_path / 'a.txt'}#body")
    assert found.code == "D001" and ".jsonl and .parquet" in found.message


def test_parquet_is_read_by_its_column_and_says_what_it_lacks(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["hello", "wörld"], "id": [1, 2], "body": ["x", None]}), file)
    folder = data.build(str(file), tokenizer.load("bytes"), tmp_path / "cache")
    made = data.load(folder, Train(global_batch=1, seq_len=4), vocab=257)
    assert made.tokens.tolist() == corpus(tmp_path, ["hello", "wörld"], seq=4, batch=1).tokens.tolist()
    for name, said in (("id", "is of int64"), ("none", "no column 'none'"), ("body", "it is null")):
        (found,) = refused(data.build, f"{file}#{name}", tokenizer.load("bytes"), tmp_path / "cache")
        assert found.code == "D003" and said in found.message
    file.write_bytes(b"PAR1 and no more")
    (found,) = refused(data.build, str(file), tokenizer.load("bytes"), tmp_path / "cache")
    assert found.code == "D001" and "not a Parquet file" in found.message


def test_a_file_that_is_no_text_is_told_what_it_looks_like(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"PAR1\x15\x04\x90\xff\x00")
    (found,) = refused(data.build, str(file), tokenizer.load("bytes"), tmp_path / "cache")
    assert found.code == "D002" and "looks like Parquet" in found.help
