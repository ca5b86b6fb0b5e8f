"""The seeds of mutations: the words of the books and of the tests, the catalog, and small files of each kind."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.random_plans import LLAMA

import meshwright as mw
from meshwright import catalog
from meshwright.plan import toml
from meshwright.spec import cluster as clusters
from meshwright.trace import chrome

ROOT = Path(__file__).parent.parent
PLANS = (
    "tp8 pp4 vpp5 dp2 zero1 mb1",
    "fsdp",
    "hsdp8 mb2 full",
    "dp8 ep8 etp1 mb2 imbalance=1.2",
    "pp2 dp4 stages=10,22 mb2 zb-h1",
    "cp4 ulysses2 ring selective recompute_layers=2 order=tp-cp-pp-dp",
    "tp4 pp4 interleaved vpp2 overlap=dp,tp,pp grads=bf16 master=none moments=fp8 gathered=kept",
    "dp2 pp2 shares=5,11 fp8_block params=fp8 loss=fused",
    "2bp:1f1b pp4 mb1 flash nosp overlap=none",
)
WORKLOADS = (
    "batch=512,seq=8192",
    "batch=64,seq=8k,tokens=15t,dtype=fp8,dropout=yes,causal=no",
    "batch=16,seq=2048,phase=lora,rank=16,targets=q+v,optimizer=adamw",
    "global_batch=32,seq_len=1024,lengths=512:0.5;2048:0.5",
)
CLUSTERS = (
    "64xh100",
    "4x8xa100",
    "16xa100-40 + 16xh100",
    "8xp5",
    "2x36xgb200",
    "8xh100+8xa100",
    "h100",
    "4x4xa100,25gbe,nics=2",
    "2x4090,pcie4",
    "nodes=4,gpus=4,device=a100,nvlink=600,nic=hdr",
    "16xh100,8xib400,nvlink=900",
    "8xh100,ib400 + 8xa100,hdr,nics=4",
    "8 x H100",
    "h100x8",
    "4x8xh100,8xndr",
)
QUESTION = """format_version = 1
model = "llama3-8b"
on = "8xh100"
train = "batch=64,seq=4096"
plan = "tp2 zero1"
framework = "megatron-core"
tokens = "15t"
days = 30
budget = "2M"
price = "h100=2.10"
"""
LENGTHS = "length\n512\n2048\n2048\n77\n", "128,a\n64,b\n"


@cache
def seeds() -> dict[str, list[bytes]]:
    """Texts of each kind of input, as bytes."""
    said = _said()
    model = "llama3-8b", "gpt3-6.7b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-0.6b", "gemma-2b", "llama-3.1-405b"
    train = mw.parse_train("batch=4,seq=128")
    small = mw.load_model("llama3-8b", num_hidden_layers=2)
    timeline = mw.predict(small, clusters.load("2xh100"), train, mw.parse_plan("pp2 mb2"), detail=False).timeline
    return {
        "plan": _bytes([*PLANS, *said["plan"]]),
        "plan.toml": _bytes(toml.dump(mw.parse_plan(words)) for words in PLANS),
        "workload": _bytes([*WORKLOADS, *said["train"]]),
        "lengths.csv": _bytes(LENGTHS),
        "cluster": _bytes([*CLUSTERS, *said["on"], *catalog.names("clusters")]),
        "cluster.toml": _cluster_files(),
        "config.json": _files("models", "*.json"),
        "model": _bytes([*model, *catalog.names("models")]),
        "question.toml": _bytes([QUESTION, QUESTION.replace('plan = "tp2 zero1"\n', "") + PLAN_TABLES]),
        "trace.json": _traces(timeline),
    }


PLAN_TABLES = "[layout]\ntp = 2\nzero = 1\n[pipeline]\nmicrobatch = 2\n"


def _bytes(texts) -> list[bytes]:
    return [text.encode() for text in dict.fromkeys(texts)]


def _said() -> dict[str, list[str]]:
    """The texts that the books give after --plan, --train and --on, by option."""
    found: dict[str, list[str]] = {"plan": [], "train": [], "on": []}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for option, quoted, plain in re.findall(r"--(plan|train|on) (?:\"([^\"\n]+)\"|([^\s`\"]+))", text):
            found[option].append(quoted or plain)
    return found


def _files(kind: str, pattern: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted(Path(str(catalog.folder(kind))).glob(pattern))]


def _cluster_files() -> list[bytes]:
    whole = [clusters.to_toml(clusters.load(text)) for text in ("16xh100", "8xa100-40 + 8xh100", "2x4xv100")]
    whole.append(clusters.template(clusters.load("4x4xa100,25gbe")))
    return _files("clusters", "*.toml") + _bytes(whole)


def _traces(timeline) -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name in ("trace.json", "trace.json.gz"):
            chrome.write(timeline, Path(folder) / name)
        return [file.read_bytes() for file in sorted(Path(folder).iterdir())]


#: A model, a cluster, a workload and a plan that are legal together: what a text that could be read is checked with.
PARTNERS = (
    (LLAMA, "8xh100", "batch=16,seq=128", "tp2 pp2 dp2 mb2"),
    ("mixtral-8x7b", "64xh100", "batch=512,seq=4096", "tp2 pp4 ep8 etp1 mb1 zero1 interleaved vpp2"),
    ("llama3-8b", "8xa100-80 + 8xh100", "batch=64,seq=4096", "tp2 pp4 dp2 mb1 zb-h1"),
)
