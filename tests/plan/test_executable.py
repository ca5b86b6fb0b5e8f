"""What is predicted and not trained: each refusal says what, where, and the nearest plan that runs."""

import pytest

from meshwright import catalog
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import load
from meshwright.spec.workload import Lora, Train

LLAMA = transformer(layers=4, hidden=64, heads=4, vocab=128, ffn=128, gated=True)
MOE = transformer(layers=4, hidden=64, heads=4, vocab=128, ffn=128, gated=True, experts=4, top_k=2)
TRAIN = Train(global_batch=8, seq_len=64)
REFUSED = [
    ("dp2", load("deepseek-v3"), TRAIN, "P030", "deepseek_v3 family"),
    ("dp2", load("gpt-oss-20b"), TRAIN, "P030", "families that are"),
    ("dp2", LLAMA, Train(global_batch=8, seq_len=64, phase="lora", lora=Lora()), "P031", "adapters"),
    ("dp2", LLAMA, Train(global_batch=8, seq_len=64, optimizer="muon"), "P031", "say one of adamw"),
    ("dp2", LLAMA, Train(global_batch=8, seq_len=64, dtype="fp8"), "P032", "'dp2 mb1 bf16'"),
    ("dp2 grads=fp16", LLAMA, TRAIN, "P032", "grads=fp16"),
    ("dp2 unfused", LLAMA, TRAIN, "P033", "unfused attention"),
    ("tp2 nosp overlap=tp", LLAMA, TRAIN, "P033", "without sequence parallelism"),
    ("tp2 overlap=tp:domino", LLAMA, TRAIN, "P033", "with sequence parallelism"),
    ("tp2 nosp overlap=tp:domino2x2", LLAMA, TRAIN, "P033", "by columns"),
    ("tp2 overlap=tp:triggered", LLAMA, TRAIN, "P033", "by memory that starts exchanges"),
    ("tp2 nosp full overlap=tp:domino", LLAMA, TRAIN, "P033", "selective"),
    ("tp2 nosp zero3 overlap=tp:domino", LLAMA, TRAIN, "P033", "zero2"),
    ("tp2 nosp overlap=tp:domino", MOE, TRAIN, "P033", "mixtures of experts"),
    ("tp2 pp2 nosp overlap=tp:ladder", LLAMA, TRAIN, "P033", "which pass on one stream"),
    ("dp2 zero3", MOE, TRAIN, "P033", "zero2"),
    ("dp2 loss=fused", LLAMA, TRAIN, "P033", "'fused'"),
    ("dp2 loss=in-place", LLAMA, TRAIN, "P033", "'in-place'"),
    ("dp2 loss_portions=2", load("bert-base"), TRAIN, "P033", "in portions"),
    ("dp2 operators", LLAMA, TRAIN, "P033", "recompute by operators"),
]


@pytest.mark.parametrize(("words", "model", "train", "code", "said"), REFUSED, ids=[f"{c[3]} {c[0]}" for c in REFUSED])
def test_what_cannot_be_trained_is_refused_with_the_nearest_that_can(words, model, train, code, said):
    found = [d for d in unexecutable(parse(words), model, train) if d.code == code]
    text = "\n".join(map(str, found))
    assert found and said in text, text
    assert all(d.place and d.help for d in found)


@pytest.mark.parametrize("words", ["dp2", "tp2 pp2 dp2 zero1", "cp4 ulysses2", "pp2 chimera", "dp2 zero3", "selective"])
@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-8b", "gpt2", "mixtral-8x7b", "gemma2-9b"])
def test_what_the_equality_tests_cover_is_not_refused(words, name):
    if "zero3" in words and name == "mixtral-8x7b":
        pytest.skip("fully sharded experts are refused")
    assert unexecutable(parse(words), load(name), TRAIN) == []


def test_the_nearest_plan_is_executable():
    for words, model, train, code, _ in REFUSED:
        for found in unexecutable(parse(words), model, train):
            if code in ("P032", "P033") and "runs: '" in found.help:
                nearest = parse(found.help.split("runs: ")[1].strip("'"))
                assert found.message not in [d.message for d in unexecutable(nearest, model, train)]


def test_every_code_of_the_matrix_is_raised_here():
    assert {c[3] for c in REFUSED} == {c for c in catalog.tables("codes") if "P030" <= c <= "P039"}
