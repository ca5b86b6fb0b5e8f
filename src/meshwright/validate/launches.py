"""Settings with which a publication's scripts launch its servers: what a row's columns leave open of the engine.

The launch scripts of the nightly benchmark InferenceMAX (now InferenceX: benchmarks/single_node/fixed_seq_len/*.sh at
8eec0d4e and 25cbe715, benchmarks/70b_*_trt_slurm.sh at 1b563c85, benchmarks/single_node/{dsr1,glm5}_fp8_h200.sh at
161e7f65 and 0c82808d) choose them by model, device and load. They changed over the months and a row does not say its
script's date: these are the scripts that were read, and none was chosen by a result. A script that does not name the
cache's precision has one of 16 bits.

Which of two scripts launched a server a row says where it names the image: until May 2026 the configurations that
predict several tokens (dsr1-fp4-b200-trt-mtp, dsr1-fp8-b200-trt-mtp) ran TensorRT-LLM's 1.2.0rc6.post3, those that do
not 1.2.0rc6.post2 (SemiAnalysisAI/InferenceX, pull requests 1488 and 1489). An image that both ran says nothing.
Servers of MiniMax-M2.5 on B200 had other settings before they ran vLLM 0.19 (pull requests 947, 996 and 1010).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

#: Words of an engine and their values.
LaunchedWords = dict[str, int | float | str]
#: Images of TensorRT-LLM whose servers on B200 predict several tokens: those of the ``-mtp`` configurations alone.
AHEAD_IMAGES = ("1.2.0rc6.post3",)
#: Images of TensorRT-LLM that ran before its servers of DeepSeek-R1 delayed prompts (perf-changelog.yaml of InferenceX,
#: pull request 594: with 1.2.0rc6.post2), and took 8,192 tokens an iteration at least, as they do for evaluations of
#: answers (benchmarks/dsr1_fp4_b200_trt_slurm.sh, dsr1_fp8_h200_trt_slurm.sh at b5ebafa3, and at 68c1a2db in a copy,
#: beside benchmarks/dsr1_fp4_b200_trt.sh at 111f0312). They were looked for where first tokens of this image were off.
EARLY_IMAGES = ("1.1.",)
#: The chance that a predicted token comes true, by how many are predicted: that with which as many of them do as the
#: engine's authors measured of DeepSeek-R1 on eight B200 (TensorRT-LLM, docs/source/blogs/tech_blog/blog1_Pushing_
#: Latency_Boundaries_Optimizing_DeepSeek-R1_Performance_on_NVIDIA_B200_GPUs.md: 1.92 tokens an iteration where one is
#: predicted, 2.82 where three are, as 0.77 + 0.77^2 + 0.77^3 is 1.82). That it is theirs and no longer what
#: AIConfigurator takes for granted (1.85 and 2.105) was chosen where servers of one image were off.
AHEAD_ACCEPT = {1: 0.92, 3: 0.77}


class LaunchedServer(NamedTuple):
    """A server that is to be launched: its ``precision``, ranks of an attention group (``tp``), groups (``adp``), the
    load's open requests and lengths, and the version of the engine's ``image``, as far as it is known."""

    precision: str
    tp: int
    adp: int
    concurrency: int
    prompt: int
    output: int
    image: str = ""

    @property
    def even(self) -> bool:
        """Whether prompts and answers are of 1,024 tokens, for which scripts delay prompts."""
        return self.prompt == self.output == 1024


class LaunchScript(NamedTuple):
    """A script: which ``engine`` it launches, the ``model`` and the ``hardware`` it is for (patterns), and the engine's
    words for a server."""

    engine: str
    model: str
    hardware: str
    words: Callable[[LaunchedServer], LaunchedWords]


def _polled(server: LaunchedServer) -> LaunchedWords:
    """--scheduler-recv-interval and --chunked-prefill-size of DeepSeek-R1 in SGLang."""
    chunk = 16384 if server.precision == "fp4" else 32768 if server.tp == 8 else 8192
    return {"poll": 30 if server.concurrency >= 16 and (server.tp == 8 or chunk == 16384) else 10, "budget": chunk}


def _delayed(server: LaunchedServer) -> LaunchedWords:
    """max_num_tokens, free_gpu_memory_fraction, attention_dp_config and batch_wait_* of DeepSeek-R1 in TensorRT-LLM;
    its schedulers are one for each group."""
    if server.image in AHEAD_IMAGES:
        return _ahead(server)
    early = server.image.startswith(EARLY_IMAGES)
    tokens = max(0 if early else 8192, -(-(server.concurrency + server.prompt + 64) // 64) * 64)
    few = server.precision == "fp8" and server.tp * server.adp == 4 and (server.prompt, server.output) == (8192, 1024)
    found: LaunchedWords = {"budget": tokens * server.adp, "memory": 0.75 if few else 0.8}
    if server.adp > 1:
        return found | {"batch_wait": 60}
    delays = not early and server.precision == "fp8" and server.even and server.concurrency >= 64
    return found | ({"batch_wait": 40, "fill": 0.8} if delays else {})


def _ahead(server: LaunchedServer) -> LaunchedWords:
    """num_nextn_predict_layers, max_num_tokens and attention_dp_config of DeepSeek-R1 in TensorRT-LLM where it predicts
    several tokens (benchmarks/single_node/dsr1_fp4_b200_trt_mtp.sh, dsr1_fp8_b200_trt_mtp.sh)."""
    guesses, batch = (1, -(-server.concurrency // server.adp)) if server.adp > 1 else (3, server.concurrency)
    tokens = ((guesses + 1) * batch + server.prompt + 64 + 63) // 64 * 64
    memory = 0.7 if server.precision == "fp8" and server.adp > 1 else 0.8
    found: LaunchedWords = {"draft": "mtp", "guesses": guesses, "accept": AHEAD_ACCEPT[guesses], "memory": memory}
    return found | {"budget": tokens * server.adp} | ({"batch_wait": 60} if server.adp > 1 else {})


def _balanced(server: LaunchedServer) -> LaunchedWords:
    """max_num_tokens and attention_dp_config of gpt-oss in TensorRT-LLM (gptoss_fp4_b200_trt.sh at 1825e7f0), which
    asks for balance and leaves the time open: the engine's own is 50 iterations (timeout_iters of AttentionDpConfig,
    tensorrt_llm/llmapi/llm_args.py), and ten more when all groups have a prompt (batching_wait_iters)."""
    waits: LaunchedWords = {"batch_wait": 50, "settle": 10} if server.adp > 1 else {}
    return {"budget": 20000 * server.adp, "memory": 0.85} | waits


def _twice(server: LaunchedServer) -> LaunchedWords:
    """--max-num-batched-tokens, --kv-cache-dtype and --block-size of MiniMax-M2.5 in vLLM on B200: twice the prompt's
    tokens in an iteration. Older images ran scripts that leave the tokens open (benchmarks/single_node/
    minimaxm2.5_fp8_b200.sh at 07e171a3, minimaxm2.5_fp4_b200.sh at 56245be3)."""
    block = {"block": 32} if server.precision == "fp8" else {}
    if server.image.startswith("0.17"):
        return {"kv": "bf16", "memory": 0.95} | block
    if server.image.startswith("nightly"):
        return {}
    return {"budget": 2 * server.prompt * server.adp, "kv": "fp8"} | block


#: Scripts of InferenceMAX.
INFERENCEMAX: tuple[LaunchScript, ...] = (
    LaunchScript("vllm", "MiniMax-M2.5", "b200", _twice),
    LaunchScript("vllm", "MiniMax-M2.5", "h100", lambda server: {"kv": "bf16", "max_batch": 256}),
    LaunchScript("vllm", "gpt-oss", "b200", lambda server: {"kv": "fp8", "max_batch": 512}),
    LaunchScript("vllm", "gpt-oss", "h[12]00", lambda server: {"kv": "bf16"}),
    LaunchScript("sglang", "DeepSeek-R1", "b200", _polled),
    LaunchScript("sglang", "DeepSeek-R1", "h200", lambda server: {"budget": 32768, "kv": "bf16"}),
    LaunchScript("sglang", "GLM-5", "h200", lambda server: {"kv": "bf16"}),
    LaunchScript("sglang", "GLM-5", "b200", lambda server: {"budget": 32768}),
    LaunchScript("sglang", "Qwen3.5", "h200", lambda server: {"budget": 16384}),
    LaunchScript("trtllm", "DeepSeek-(R1|V3)", "b200", _delayed),
    LaunchScript("trtllm", "DeepSeek-(R1|V3)", "h200", lambda s: _delayed(s._replace(precision="")) | {"memory": 0.75}),
    LaunchScript("trtllm", "gpt-oss", "", _balanced),
    LaunchScript(
        *("trtllm", "Llama-3.[13]-70B", ""),
        lambda server: {"budget": 16384} | ({"batch_wait": 20, "fill": 0.9} if server.even and server.tp < 8 else {}),
    ),
)


def launched(
    scripts: tuple[LaunchScript, ...], row: dict[str, str], engine: str, server: LaunchedServer
) -> LaunchedWords:
    """Return the engine's words that a row's script says; none where no script is for its model, device and engine."""
    for script in scripts:
        patterns = (script.model, row["model"]), (script.hardware, row["hardware"])
        if script.engine == engine and all(re.search(pattern, said) for pattern, said in patterns):
            return script.words(server)
    return {}
