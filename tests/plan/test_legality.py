"""What makes a plan illegal: every code with its teaching words, all violations at once, nothing changed silently."""

import msgspec
import pytest
from hypothesis import given, settings

from meshwright import catalog
from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.lower import lower
from meshwright.plan import Pool, check, parse
from meshwright.plan.legality import one_stream
from meshwright.spec.ends import Stream
from meshwright.spec.model import load, transformer
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as parse_train
from tests.random_plans import CLUSTERS, GPT, LATENT, LLAMA, MIXTURE, MODELS, of_size, plans_in_words, sized

WHERE = CLUSTERS["64xh100"]
TRAIN = Train(global_batch=64, seq_len=128)
MULTI_QUERY = transformer(layers=4, hidden=192, heads=12, kv_heads=3, vocab=128, name="mqa")
ODD_WIDTH = transformer(layers=4, hidden=256, heads=8, ffn=1026, vocab=128, name="odd")

LONG = Train(global_batch=64, seq_len=8192)

#: (words, model, workload, code, what the message, its place and its help say)
ILLEGAL = [
    ("tp8 pp4 dp4", GPT, TRAIN, "P010", "needs 128 ranks and 64xh100 has 64|tp8 * pp4 * cp1 * dp4 = 128|dp is 2"),
    ("tp64 pp2", GPT, TRAIN, "P010", "needs 128 ranks|take smaller axes"),
    ("dp4", GPT, TRAIN, "P010", "has 4 ranks and 64xh100 has 64|tp1 * pp1 * cp1 * dp4 = 4|dp is 64"),
    ("pp3", GPT, TRAIN, "P010", "has 63 ranks and 64xh100 has 64|tp, pp and cp must divide 64|say a smaller cluster"),
    ("tp16", GPT, TRAIN, "P011", "tp=16 does not divide num_heads=8 (gpt)|valid tp: 1, 2, 4, 8"),
    ("tp2", MULTI_QUERY, TRAIN, "P011", "tp=2 and num_kv_heads=3 do not divide each other|1, 3, or a multiple of 3"),
    ("tp4", ODD_WIDTH, TRAIN, "P011", "does not divide the MLP width 1026"),
    ("tp4", GPT, Train(global_batch=64, seq_len=126), "P012", "shards 126 tokens over tp=4|say nosp"),
    ("pp8 interleaved vpp2", GPT, TRAIN, "P013", "16 stages for 12 layers|at most 14 stages"),
    ("pp4 stages=4,0,4,4", GPT, TRAIN, "P013", "stage 1 of stages= holds no layer|only the first stage"),
    ("pp2 stages=4,4,4", GPT, TRAIN, "P013", "stages= names 3 stages and pp2 * vpp1 makes 2|give 2 numbers"),
    ("pp2 stages=5,6", GPT, TRAIN, "P013", "hold 11 layers and gpt has 12|must add up to 12"),
    ("dp3 mb2", GPT, TRAIN, "P014", "not a multiple of dp3 * mb2 = 6|never changed for you: take batch=60 or 66"),
    (
        "dp8",
        GPT,
        Train(global_batch=8_000_000, seq_len=128),
        "P024",
        "1,000,000 microbatches through 12 layers|at most 166,666",
    ),
    ("dp64 shares=1,2", GPT, TRAIN, "P025", "names 2 kinds of data-parallel slices and this layout has 1|drop shares"),
    ("dp64 hold=1", GPT, TRAIN, "P026", "who holds how much of sharded state, and nothing is sharded|say zero1"),
    ("cp4 dp1", GPT, Train(global_batch=64, seq_len=132), "P015", "does not divide into 8 pieces|2 * cp"),
    (
        "cp4 dp1 allgather",
        GPT,
        Train(global_batch=64, seq_len=132),
        "P015",
        "into 8 pieces (balanced causal attention takes an early and a late piece a rank)|2 * cp",
    ),
    ("cp4 dp1 ring-self-attention", GPT, Train(global_batch=64, seq_len=126), "P015", "into 4 pieces (each rank"),
    ("cp4 dp1 ulysses", GPT, Train(global_batch=64, seq_len=126), "P015", "into 4 pieces (each rank takes one"),
    (
        "cp8 dp1 ulysses3",
        GPT,
        TRAIN,
        "P015",
        "inside a ring or an allgather of cp=8 / 3|inside cp8: ulysses2, ulysses4",
    ),
    ("cp4 dp1 ulysses4", GPT, TRAIN, "P015", "sequence.ulysses = 4|inside cp4: ulysses2; or ulysses alone for all 4"),
    ("dp4 ulysses2", GPT, TRAIN, "P015", "of cp=1 / 2|inside cp1: none"),
    ("cp4 dp1 ulysses ulysses2", GPT, TRAIN, "P015", "and ulysses is neither|ulysses2; or ulysses alone"),
    ("tp4 cp8 dp1 ulysses4", GPT, TRAIN, "P015", "a rank's 2 heads over ulysses=4|valid ulysses: 1, 2; or ring"),
    ("tp4 cp4 dp1 ulysses", GPT, TRAIN, "P015", "splits a rank's 2 heads over cp=4|valid cp: 1, 2; or ring"),
    ("cp2 dp1 unfused", GPT, TRAIN, "P016", "ring attention merges partial softmaxes|say flash, or ulysses"),
    ("dp4 ep2", GPT, TRAIN, "P017", "gpt has no experts|drop ep"),
    ("tp2 duplicates=sent", MIXTURE, TRAIN, "P017", "shards of sequences: ranks that hold|say nosp etp2"),
    ("dp64 ep16", MIXTURE, TRAIN, "P017", "ep=16 does not divide num_experts=8|valid ep: 1, 2, 4, 8"),
    (
        "tp3 dp1 etp3",
        MIXTURE,
        Train(global_batch=64, seq_len=129),
        "P017",
        "etp=3 does not divide the expert width",
    ),
    ("dp2 ep4", MIXTURE, TRAIN, "P018", "ep4 * etp1 = 4 does not divide tp*cp*dp = 2|valid ep at etp=1: 1, 2"),
    ("fsdp dp8 shard3", GPT, TRAIN, "P019", "group of 3 does not divide dp*cp = 8|valid: 1, 2, 4, 8"),
    ("fsdp pp2 chimera", GPT, TRAIN, "P020", "chimera holds every stage on two ranks|say zero1"),
    ("dp1 recompute_layers=2", GPT, TRAIN, "P021", "recompute_layers=2 without a recompute mode|full or selective"),
    ("pp4 full recompute_layers=4", GPT, TRAIN, "P021", "a chunk has at most 3 layers"),
    ("dp1 grads=none", GPT, TRAIN, "P022", "grads=none: there is nothing to train with|fp32, bf16"),
    ("dp1 moments=none", GPT, TRAIN, "P022", "moments=none"),
    ("dp1", GPT, Train(global_batch=64, seq_len=128, optimizer="adan"), "P022", "unknown optimizer 'adan'|adamw"),
    ("dp4 pp2 ep2 order=tp-cp-pp-dp", MIXTURE, TRAIN, "P023", "refactors tp, cp and dp|put pp last"),
    ("dp8 pp8", load("zamba2-2.7b"), TRAIN, "P027", "weights several layers share|zamba2-2.7b|say pp1"),
    ("dp32 cp2", load("jamba-v0.1"), TRAIN, "P027", "context parallelism of Mamba-1 layers is not modelled|say cp1"),
    ("tp2 cp32 dp1", load("qwen3-next-80b-a3b"), LONG, "P027", "cp=32 does not divide a rank's heads of the mixer=16"),
    ("dp32 cp2", load("t5-base"), TRAIN, "P028", "encoder tokens and decoder tokens of lengths of their own|say cp1"),
    ("tp8 adp4", GPT, TRAIN, "P029", "adp4 is a word of serving|layout.adp|drop adp4"),
    ("dp64 bf16 weights=int4", GPT, TRAIN, "P029", "weights=int4 is a word of serving|say what is served: --serve"),
    ("dp64 int8", GPT, TRAIN, "P029", "int8 is a word of serving: nothing is trained in it|say bf16 or fp8"),
    ("dp64 fp8 weights=fp8", GPT, TRAIN, "P022", "weights=fp8 stores 1 bytes a weight, and fp8 has 1|bf16 weights=fp8"),
    ("tp8 adp3", GPT, TRAIN, "P011", "adp=3 groups do not divide the tp=8 ranks|valid adp at tp8: 1, 2, 4, 8"),
    ("pp4 dp1 interleaved vpp3", GPT, Train(global_batch=6, seq_len=128), "S013", "microbatches"),
    ("pp4 dp1 zb-h1 vpp2", GPT, TRAIN, "S011", "holds 1 stages on each rank, not vpp=2"),
]


@pytest.mark.parametrize(("words", "model", "train", "code", "said"), ILLEGAL, ids=[f"{c[3]} {c[0]}" for c in ILLEGAL])
def test_an_illegal_plan_is_refused_with_the_values_the_place_and_the_way_out(words, model, train, code, said):
    found = [d for d in check(parse(words), model, WHERE, train) if d.code == code]
    assert found
    text = "\n".join(map(str, found))
    assert all(part in text for part in said.split("|")), text
    assert all(d.place and d.help for d in found)
    with pytest.raises(MeshwrightError) as caught:
        predict(model, WHERE, train, parse(words))
    assert caught.value.exit_code == 2


def test_every_code_of_an_illegal_plan_is_raised_here_or_with_its_words():
    by_the_text = {"P001", "P002", "P003", "P004"}
    assert {c[3] for c in ILLEGAL if c[3][0] == "P"} | by_the_text == {
        c for c in catalog.tables("codes") if "P000" < c < "P030"
    }


def test_all_violations_come_at_once():
    plan = parse("tp16 pp8 interleaved vpp2 dp3 cp2 unfused ep2 fsdp shard5 recompute_layers=3 grads=none")
    found = check(plan, GPT, WHERE, Train(global_batch=64, seq_len=126))
    codes = {"P010", "P011", "P012", "P013", "P014", "P015", "P016", "P017", "P019", "P021", "P022"}
    assert {d.code for d in found} == codes


@pytest.mark.parametrize("words", ["dp1 mb1", "tp2 pp2 dp2 mb4", "fsdp dp64 mb1", "pp4 dp4 zb-v mb2", "cp2 dp8 mb2"])
def test_the_batch_is_never_changed(words):
    where = sized(parse(words))
    found = predict(LLAMA, where, TRAIN, parse(words), detail=False)
    assert found.train == TRAIN
    layout, pipeline = found.plan.layout, found.plan.pipeline
    lowered = lower(found.plan, LLAMA, where, TRAIN)
    assert lowered.actions.num_microbatches * layout.dp * pipeline.microbatch == TRAIN.global_batch
    assert found.tokens_per_s_per_gpu == pytest.approx(64 * 128 / found.step_time_s / layout.num_ranks)


@pytest.mark.parametrize(
    ("words", "message", "help"),
    [
        ("dp4", "the plan has 4 ranks and 8xh100 has 8 devices", "with these tp, pp and cp, dp is 8"),
        ("tp2 pp2 dp1", "the plan has 4 ranks and 8xh100 has 8 devices", "with these tp, pp and cp, dp is 2"),
        ("pp3", "the plan has 6 ranks and", "tp, pp and cp must divide 8; to leave devices out, say a smaller cluster"),
        ("dp16", "the plan needs 16 ranks and 8xh100 has 8 devices", "with these tp, pp and cp, dp is 8"),
        (
            "pp3 dp3",
            "the plan needs 9 ranks",
            "tp, pp and cp must divide 8; to leave devices out, say a smaller cluster",
        ),
        ("pp12", "the plan needs 12 ranks and 8xh100 has 8 devices", "take smaller axes, such as tp1 cp1 pp8"),
    ],
)
def test_ranks_that_are_not_the_devices_are_refused_with_the_dp_that_makes_them_so(words, message, help):
    (found,) = [d for d in check(parse(words), GPT, of_size(8), TRAIN) if d.code == "P010"]
    assert found.message.startswith(message)
    assert found.help == help


@pytest.mark.parametrize("words", ["dp8", "tp2 pp2 dp2", "pp4", "tp8"])
def test_ranks_that_are_the_devices_are_legal_with_dp_said_or_open(words):
    assert check(parse(words), GPT, of_size(8), TRAIN) == []


def test_an_open_dp_is_checked_as_it_is_filled_in():
    assert check(parse("tp8"), GPT, WHERE, TRAIN) == []
    (found,) = check(parse("tp8"), GPT, WHERE, Train(global_batch=60, seq_len=128))
    assert found.code == "P014" and "dp8" in found.message


@settings(max_examples=300)
@given(plans_in_words())
def test_any_plan_that_can_be_said_is_refused_with_reasons_or_lowers(plan):
    for model in MODELS:
        found = check(plan, model, WHERE, TRAIN)
        assert all(d.message and d.place and d.help for d in found)
        if not found:
            assert lower(plan.on(64), model, WHERE, TRAIN).graph.num_tasks


def test_latent_attention_has_no_key_value_heads_to_divide():
    assert check(parse("tp4"), LATENT, WHERE, TRAIN) == []


def test_uneven_stages_are_legal_and_take_their_layers():
    plan = parse("pp4 dp1 mb1 stages=2,4,4,2")
    assert check(plan, GPT, of_size(4), TRAIN) == []
    assert [len(s) for s in predict(GPT, of_size(4), TRAIN, plan, detail=False).stage_layers] == [2, 4, 4, 2]


def test_layers_that_do_not_divide_spare_the_ends():
    # 12 layers on 5 stages: the last and the first, which also hold head and embedding, get fewer
    found = predict(GPT, of_size(5), TRAIN, parse("pp5 dp1 mb1"), detail=False).stage_layers
    assert [len(s) for s in found] == [2, 3, 3, 2, 2]


def learned(limit):
    return transformer(layers=2, hidden=64, heads=4, vocab=128, name="table", positions="learned", max_seq_len=limit)


def test_learned_positions_do_not_reach_beyond_their_table():
    found = check(parse("tp1"), learned(2048), WHERE, Train(global_batch=64, seq_len=4096))
    assert [d.code for d in found] == ["W006"]
    assert "learned positions for 2,048 tokens, not for 4,096" in found[0].message and "seq=2048" in found[0].help
    assert not check(parse("tp1"), learned(2048), WHERE, Train(global_batch=64, seq_len=2048))


def test_documents_within_the_table_may_be_packed_into_longer_sequences():
    packed = parse_train("batch=64,seq=4096,lengths=512:0.5;2048:0.5")
    assert not check(parse("tp1"), learned(2048), WHERE, packed)


def test_documents_are_packed_for_one_stream_of_tokens_and_one_pool():
    packed = parse_train("batch=64,seq=2048,lengths=512,pack=padded")
    streams = (Stream(name="source", hidden=64), Stream(name="target", hidden=64))
    found = check(parse("tp1"), msgspec.structs.replace(learned(2048), streams=streams), WHERE, packed)
    (said,) = [d for d in found if d.code == "W010"]
    assert "2 streams of tokens (source, target)" in said.message and said.place == "--train lengths=512:1,pack=padded"
    assert not check(parse("tp1"), learned(2048), WHERE, packed)
    images = msgspec.structs.replace(learned(2048), streams=(Stream(name="image", hidden=64, tokens=196),))
    assert "196 tokens of each image" in next(one_stream(parse("tp1"), images, packed)).message
    pools = msgspec.structs.replace(parse("tp1"), several=(Pool(plan=parse("tp1")), Pool(plan=parse("tp1"))))
    assert "a plan of 2 pools" in next(one_stream(pools, learned(2048), packed)).message


def test_a_folder_where_a_plan_is_meant_is_said_to_be_one(tmp_path, monkeypatch):
    (tmp_path / "adir").mkdir()
    (tmp_path / "adir" / "mine.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeshwrightError, match="'adir' is a folder") as caught:
        parse("adir")
    assert "adir/mine.toml" in str(caught.value)
    (tmp_path / "tp8").mkdir()
    assert parse("tp8").layout.tp == 8
