"""``meshwright serve`` as a user starts it: what OpenAI's client gets is what transformers generates, whatever dies."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest
import torch
from fuzz.fake_model import write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshwright.endpoint.text import ModelText

PROMPTS = ("hello world", "one two three", "a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of two layers with random weights, whose tokens are bytes."""
    found = write_tokenizer(tmp_path_factory.mktemp("model") / "llama")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=266, num_key_value_heads=2, max_position_embeddings=512, **shape, **ends)
    LlamaForCausalLM(config).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def server(folder):
    """The command, and the URL that it prints."""
    words = ["--model", str(folder), "--plan", "dp2", "--serve", "policy=vllm-v1,kv_blocks=256", "--port", "0"]
    command = [sys.executable, "-m", "meshwright", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url, name, *_ = process.stdout.readline().split()
            assert name == "llama"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield process, client
        finally:
            process.kill()


def generated(folder, prompt, count):
    """The text that transformers adds to a prompt."""
    text = ModelText(folder)
    ids = torch.tensor([text.encode(prompt)])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    whole = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=1)[0].tolist()
    return text.decode(whole)[len(text.decode(whole[: ids.shape[1]])) :]


def engine_of(process):
    """The process of the engine that the command started last."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[-1])


def test_the_client_s_texts_are_what_transformers_generates_though_the_engine_is_killed(server, folder):
    process, client = server
    count = 64
    expected = [generated(folder, prompt, count) for prompt in PROMPTS]
    same = {"model": "llama", "max_tokens": count, "temperature": 0}
    together = client.completions.create(prompt=list(PROMPTS), **same)
    assert [choice.text for choice in together.choices] == expected
    first, seen = engine_of(process), threading.Event()
    found = {}

    def stream(prompt):
        parts = []
        for chunk in client.completions.create(prompt=prompt, stream=True, **same):
            parts.append(chunk.choices[0].text)
            seen.set()
        found[prompt] = "".join(parts)

    threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    assert seen.wait(30)
    os.kill(first, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert [found.get(prompt) for prompt in PROMPTS] == expected and engine_of(process) != first
    figures = urlopen(str(client.base_url).replace("/v1/", "/metrics")).read().decode()
    assert re.search(r"^meshwright:requests_retried_total\S* ([1-3])\.0$", figures, re.MULTILINE)


def test_it_ends_with_exit_code_0_at_the_first_signal(server):
    process, client = server
    assert client.models.list().data[0].id == "llama"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
