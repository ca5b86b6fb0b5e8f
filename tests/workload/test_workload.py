"""The workload's words: read back exactly, every fault named at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.errors import MeshwrightError
from meshwright.spec.workload import DTYPE_BYTES, LORA_TARGETS, OPTIMIZER_MOMENTS, Lengths, Lora, Train, parse


@st.composite
def workloads(draw):
    count = st.integers(1, 10**6)
    lora = None
    if draw(st.booleans()):
        targets = draw(st.lists(st.sampled_from(LORA_TARGETS), min_size=1, unique=True))
        lora = Lora(rank=draw(count), targets=tuple(targets))
    lengths = None
    if draw(st.booleans()):
        tokens = draw(st.lists(count, min_size=1, max_size=5, unique=True))
        lengths = Lengths(tuple(tokens), (1 / len(tokens),) * len(tokens))
    return Train(
        global_batch=draw(count),
        seq_len=draw(count),
        lengths=lengths,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZER_MOMENTS))),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        tokens=draw(st.sampled_from([0.0, 1.5e9, 1.5e13, 15.6e12])),
        phase="lora" if lora else draw(st.sampled_from(["pretrain", "sft"])),
        lora=lora,
        dropout=draw(st.booleans()),
        causal=draw(st.booleans()),
    )


@given(workloads())
def test_a_workloads_words_are_read_back(train):
    back = parse(train.text())
    if train.lengths is not None:  # shares are written to six digits
        assert back.lengths.tokens == train.lengths.tokens
        assert back.lengths.share == pytest.approx(train.lengths.share)
        assert back.attended == pytest.approx(train.attended)
        back, train = ({f: getattr(t, f) for f in t.__struct_fields__ if f != "lengths"} for t in (back, train))
    assert back == train


def test_counts_may_be_written_short():
    train = parse("batch=2k,seq=8k,tokens=15t")
    assert (train.global_batch, train.seq_len, train.tokens) == (2048, 8192, 15e12)
    assert train.tokens_per_step == 2048 * 8192
    assert parse("global_batch=4, seq_len=8") == parse("batch=4,seq=8")


def test_a_packed_batch_attends_within_documents():
    # half the documents of 512 tokens, half of 2048: E[l^2] / E[l] = (512^2 + 2048^2) / (512 + 2048)
    train = parse("batch=1,seq=8192,lengths=512:0.5;2048:0.5")
    assert train.lengths.mean == 1280
    assert train.attended == pytest.approx((512**2 + 2048**2) / 2560)
    assert parse("batch=1,seq=1024,lengths=512;2048").attended == 1024  # no longer than the sequence
    assert parse("batch=1,seq=4096").attended == 4096


def test_lengths_come_from_a_file_too(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n512\n2048\n512\n512\n")
    assert parse(f"batch=1,seq=8192,lengths={file}").lengths == Lengths((512, 2048), (0.75, 0.25))


def test_lora_has_its_defaults_and_its_targets():
    assert parse("batch=1,seq=8,phase=lora").lora == Lora(rank=16, targets=("q", "k", "v", "o"))
    assert parse("batch=1,seq=8,rank=8,targets=all") == parse("batch=1,seq=8,phase=lora,rank=8,targets=all")
    assert parse("batch=1,seq=8,targets=q+down").lora.targets == ("q", "down")


FAULTS = [
    ("batch=4,seq=8,colour=red", "W001", "unknown workload key 'colour'"),
    ("batch=4,seq=8,sequence=1", "W001", "did you mean seq"),
    ("batch=zero,seq=8", "W002", "batch = 'zero' is not a positive number of sequences"),
    ("batch=0,seq=8", "W002", "batch = '0' is not a positive number"),
    ("batch=99999999999,seq=8", "W002", "up to 1e9"),
    ("batch=4,seq=1e30", "W002", "up to 1e9"),
    ("batch=4,seq=8,rank=99999999999", "W002", "up to 1e9"),
    ("batch=4,seq=8,batch=5", "W005", "batch=4 and batch=5 contradict"),
    ("batch=4,seq=8,dtype=fp7", "W002", "dtype = 'fp7' is not one of fp32, fp16, bf16"),
    ("batch=4,seq=8,optimizer=adan", "W002", "is not one of adamw"),
    ("batch=4,seq=8,dropout=maybe", "W002", "is not yes or no"),
    ("batch=4,seq=8,tokens=-1", "W002", "is not a number of tokens such as 15t"),
    ("batch=4,seq=8,phase=pretrain,rank=8", "W002", "rank and targets belong to phase=lora"),
    ("batch=4,seq=8,targets=q+z", "W002", "or all"),
    ("batch=4,seq=8,lengths=512:0", "W002", "lengths with shares"),
    ("batch=4,seq=8,lengths=512:x", "W002", "lengths with shares"),
    ("seq=8", "W003", "does not say batch"),
    ("batch=4", "W003", "does not say seq"),
    ("", "W003", "for example batch=512,seq=8192"),
    ("batch=4,seq=8,lengths=none.csv", "W004", "cannot read the document lengths: No such file"),
]


@pytest.mark.parametrize(("text", "code", "said"), FAULTS, ids=[f[0] or "empty" for f in FAULTS])
def test_a_fault_is_named_with_its_place(text, code, said):
    with pytest.raises(MeshwrightError) as caught:
        parse(text)
    found = [d for d in caught.value.diagnostics if d.code == code]
    assert found and said in "\n".join(map(str, found))
    assert all(d.place for d in found)


def test_every_code_of_a_workload_is_raised_here():
    beside_a_model = {"W006"}  # tests/plan/test_legality.py
    known = {code for code in catalog.tables("codes") if code.startswith("W")}
    assert {code for _, code, _ in FAULTS} == known - beside_a_model


def test_all_faults_come_at_once():
    with pytest.raises(MeshwrightError) as caught:
        parse("batch=x,colour=red,dtype=fp7")
    assert [d.code for d in caught.value.diagnostics] == ["W002", "W001", "W002", "W003"]


def test_a_file_of_lengths_says_which_lines_are_wrong(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("512\nten\n-3\n")
    with pytest.raises(MeshwrightError) as caught:
        parse(f"batch=1,seq=8,lengths={file}")
    (found,) = caught.value.diagnostics
    assert found.code == "W004" and ":2: 'ten'" in found.place and ":3: '-3'" in found.place
    file.write_bytes(b"\xff\xfe5")
    with pytest.raises(MeshwrightError, match="it is not UTF-8 text"):
        parse(f"batch=1,seq=8,lengths={file}")
    file.write_text("")
    with pytest.raises(MeshwrightError, match="the file has no lengths"):
        parse(f"batch=1,seq=8,lengths={file}")


def test_a_line_longer_than_any_number_is_one_error(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("6" * 140_000)  # beyond what the csv module takes for a field
    with pytest.raises(MeshwrightError, match="W004"):
        parse(f"batch=1,seq=64,lengths={file}")
