"""The workload's words: read back exactly, every fault named at once."""

import gzip
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.errors import MeshwrightError
from meshwright.spec.items import Item
from meshwright.spec.workload import LORA_TARGETS, OPTIMIZER_MOMENTS, PACKS, TRAINED_DTYPES, Lengths, Lora, Train, parse


@st.composite
def workloads(draw):
    count = st.integers(1, 10**6)
    lora = None
    if draw(st.booleans()):
        targets = draw(st.lists(st.sampled_from(LORA_TARGETS), min_size=1, unique=True))
        lora = Lora(rank=draw(count), targets=tuple(targets))
    lengths = None
    if draw(st.booleans()):
        tokens = sorted(draw(st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True)))
        lengths = Lengths(tuple(tokens), (1 / len(tokens),) * len(tokens))
    return Train(
        global_batch=draw(count),
        seq_len=draw(st.integers(64, 10**6)),
        lengths=lengths,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZER_MOMENTS))),
        dtype=draw(st.sampled_from(sorted(TRAINED_DTYPES))),
        tokens=draw(st.sampled_from([0.0, 1.5e9, 1.5e13, 15.6e12])),
        phase="lora" if lora else draw(st.sampled_from(["pretrain", "sft"])),
        lora=lora,
        dropout=draw(st.booleans()),
        causal=draw(st.booleans()),
        pack=draw(st.sampled_from(("", *PACKS))),
        seed=draw(st.integers(0, 999)),
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
    # cut by sequences of 1024 at multiples of 512: those of 512 are whole, and 2048 are two pieces of 1024, or as
    # often two of 512 and one of 1024: (512^2 + (2 * 1024^2 + 2 * 512^2 + 1024^2) / 2) / (512 + 2048)
    assert parse("batch=1,seq=1024,lengths=512;2048,pack=concat").attended == pytest.approx(819.2)
    # nothing is cut where documents are sequences, and anywhere where no length divides the sequence:
    # (511^2 (1 - 511 / 3072) + 2047 * 1024 - 1024^2 / 3) / (511 + 2047), but for 1 / 3 of a token squared
    assert parse("batch=1,seq=1024,lengths=1024,pack=concat").attended == 1024
    assert parse("batch=1,seq=1024,lengths=511;2047,pack=concat").attended == pytest.approx(767.9001, rel=1e-6)
    # a document and its padding: (256^2 + 768^2) / 1024
    assert parse("batch=1,seq=1024,lengths=256,pack=padded").attended == 640
    assert parse("batch=1,seq=4096").attended == 4096


def test_lengths_come_from_a_file_too(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n512\n2048\n512\n512\n")
    assert parse(f"batch=1,seq=8192,lengths={file}").lengths == Lengths((512, 2048), (0.75, 0.25), str(file))


def test_a_column_of_a_table_is_named_and_columns_are_added(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,28\n0.5,200,56\n0.9,100,28\n")
    (tmp_path / "t.jsonl").write_text('{"prompt": 100, "answer": 28}\n\n{"prompt": 200, "answer": 56}\n')
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        file.write((tmp_path / "t.csv").read_text())
    for name in ("t.csv", "t.csv.gz"):
        one = parse(f"batch=1,seq=512,lengths={name}#prompt_tokens", base=tmp_path).lengths
        both = parse(f"batch=1,seq=512,lengths={name}#prompt_tokens+output_tokens", base=tmp_path).lengths
        assert one == Lengths((100, 200), (2 / 3, 1 / 3), f"{name}#prompt_tokens")
        assert both.tokens == (128, 256)
    assert parse("batch=1,seq=512,lengths=t.jsonl#prompt+answer", base=tmp_path).lengths.tokens == (128, 256)
    for words, said in (
        ("t.csv", "the table has 3 columns: arrival_s, prompt_tokens, output_tokens"),
        ("t.csv#tokens", "no column tokens"),
        ("t.jsonl", "its lines have 2 keys"),
        ("t.jsonl#prompt+reply", "t.jsonl:1: 'no reply'"),
        ("t.csv#arrival_s", "t.csv:2: '0.0'"),
    ):
        with pytest.raises(MeshwrightError) as caught:
            parse(f"batch=1,seq=512,lengths={words}", base=tmp_path)
        assert said in str(caught.value.diagnostics[0])


def test_a_log_normal_distribution_has_the_mean_and_the_spread_that_it_says():
    # closed forms: the median is mean * exp(-sigma^2 / 2), and E[l^2] / E[l] = mean * exp(sigma^2)
    for text in ("lognormal:mean=2048;sigma=0.5", "lognormal:mean=2048,sigma=0.5"):
        found = parse(f"batch=1,seq=1m,lengths={text}").lengths
        assert found.mean == pytest.approx(2048, rel=2e-3)
        assert found.attended == pytest.approx(2048 * math.exp(0.25), rel=1e-2)
        middle = sum(s for t, s in zip(found.tokens, found.share) if t <= 2048 * math.exp(-0.125))
        assert middle == pytest.approx(0.5, abs=1e-3)
    half = parse("batch=1,seq=2048,lengths=lognormal:median=2048;sigma=1").lengths
    assert half.tokens[-1] == 2048 and half.share[-1] == pytest.approx(0.5, abs=1e-3)  # those above are cut to it


def test_one_length_at_the_size_of_a_sequence_is_the_plain_microbatch():
    plain, said = parse("batch=4,seq=512"), parse("batch=4,seq=512,lengths=512")
    assert said.microbatch(2) == plain.microbatch(2) == ((Item(512, 512.0), 2),)


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
    ("batch=4,seq=8,phase=pretrain,rank=8", "W002", "rank, targets, alpha and lora_dropout belong to phase=lora"),
    ("batch=4,seq=8,targets=q+z", "W002", "or all"),
    ("batch=4,seq=8,lengths=0:1", "W002", "lengths with shares"),
    ("batch=4,seq=8,lengths=x", "W002", "lengths with shares"),
    ("batch=4,seq=8,lengths=512:0;4:1", "W004", "no share of the documents: 512:0"),
    ("batch=4,seq=8,lengths=512:x", "W004", "no share of the documents: 512:x"),
    ("batch=4,seq=8,lengths=4:nan", "W004", "no share of the documents: 4:nan"),
    ("batch=4,seq=8,lengths=4:0.5;8", "W004", "each length has its share"),
    ("batch=4,seq=8,lengths=4:0.5;8:0.4", "W004", "the shares sum to 0.9, not to 1"),
    ("batch=4,seq=8,lengths=lognormal:mean=8", "W004", "it needs sigma, and mean or median"),
    ("batch=4,seq=8,lengths=lognormal:mean=nan;sigma=-1", "W004", "not parameters above 0: mean, sigma"),
    ("batch=4,seq=8,lengths=lognormal:mean=8;sigma=1;mode=3", "W004", "mode"),
    ("batch=4,seq=8,lengths=4;9;10", "W007", "longer than a sequence of seq=8 tokens: 9; 10"),
    ("batch=4,seq=8,pack=tight", "W002", "pack = 'tight' is not one of packed, padded, balanced, reordered, concat"),
    ("batch=4,seq=8,seed=-1", "W002", "is not a whole number from 0"),
    ("seq=8", "W003", "does not say batch"),
    ("batch=4", "W003", "does not say seq"),
    ("", "W003", "for example batch=512,seq=8192"),
    ("batch=4,seq=8,routing=zipf:affinity=2", "W018", "affinity=2 is not a number from 0 to 1"),
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
    beside_a_model = {"W006", "W008", "W009", "W010"}  # tests/plan/test_legality.py, tests/assign/test_packing.py
    of_serving = {f"W{number:03}" for number in range(11, 17)}  # test_serve*.py, test_request*.py, tests/simulate
    of_images = {"W019"}  # tests/simulate/test_denoise.py
    of_rollouts = {"W020"}  # tests/answer/test_rollouts.py
    of_feeds = {"W021", "W022", "W023"}  # tests/simulate/test_feed.py, tests/answer/test_recipe.py
    known = {code for code in catalog.tables("codes") if code.startswith("W")}
    assert {code for _, code, _ in FAULTS} == known - beside_a_model - of_serving - of_images - of_rollouts - of_feeds


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


def test_lengths_beyond_a_sequence_are_named_by_line_unless_they_are_cut(tmp_path):
    (tmp_path / "lengths.txt").write_text("512\n\n9000\n8192\n10000\n")
    with pytest.raises(MeshwrightError) as caught:
        parse("batch=1,seq=8192,lengths=lengths.txt", base=tmp_path)
    (found,) = caught.value.diagnostics
    assert found.code == "W007" and "lengths.txt:3: 9,000; lengths.txt:5: 10,000" in found.message
    assert parse("batch=1,seq=8192,lengths=lengths.txt,pack=concat", base=tmp_path).longest_document == 8192


def test_a_line_longer_than_any_number_is_one_error(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("6" * 140_000)  # beyond what the csv module takes for a field
    with pytest.raises(MeshwrightError, match="W004"):
        parse(f"batch=1,seq=64,lengths={file}")
