"""Answers in JSON: what a random model says keeps to the schema, with and without guesses."""

import json

import pytest
import torch
from fuzz.fake_model import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.endpoint import grammar
from meshwright.endpoint.bodies import CompletionBody, NamedSchema, ResponseFormat, read
from meshwright.endpoint.refusal import Refused
from meshwright.endpoint.seam import Prompted, Sampling
from meshwright.endpoint.text import ModelText
from tests.run.served_models import served

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = write_tokenizer(tmp_path_factory.mktemp("model") / "llama")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=280, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, **shape)
    LlamaForCausalLM(config).save_pretrained(found)  # a vocabulary beyond the tokenizer's, as many models have
    return found


def test_without_the_package_the_refusal_says_how_it_is_had(monkeypatch):
    monkeypatch.setattr(grammar, "MODULE", "no_such_module")
    with pytest.raises(Refused, match=r"pip install 'meshwright\[grammar\]'"):
        grammar.schema_of(ResponseFormat(type="json_object"))
    assert grammar.schema_of(None) == grammar.schema_of(ResponseFormat(type="text")) == ""


def test_schemas_that_are_none_are_refused_with_their_field():
    pytest.importorskip("llguidance")
    body = read(
        b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}', CompletionBody
    )
    with pytest.raises(Refused, match="a name and a schema"):
        grammar.schema_of(body.response_format)
    for wrong in ({"type": "nothing"}, {"type": "string", "pattern": "(?<=a)b"}):
        with pytest.raises(Refused, match="nothing that can be kept to"):
            grammar.schema_of(ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=wrong)))
    with pytest.raises(Refused, match="ends where its JSON does"):
        grammar.schema_of(ResponseFormat(type="json_object"), least=4)


@pytest.mark.parametrize("words", ["block=4,kv_blocks=200", "block=4,kv_blocks=200,draft=ngram,guesses=3"])
def test_answers_keep_to_their_schema_whatever_the_model_would_say(folder, words):
    pytest.importorskip("llguidance")
    text, one = ModelText(folder), served(folder, words)
    said = ResponseFormat(type="json_schema", json_schema=NamedSchema(name="thing", schema=SCHEMA))
    schema = grammar.schema_of(said)
    made: dict[int, list[int]] = {}
    for number in range(6):
        how = Sampling(temperature=0.0 if number < 2 else 2.0, seed=number, schema=schema if number != 1 else "")
        one.submit(Prompted(number=number, prompt=text.encode("say " * (number + 1)), limit=80, sampling=how))
    while not one.idle:
        for piece in one.step():
            assert not piece.error
            made.setdefault(number := piece.number, []).extend(piece.tokens)
            assert number == 1 or piece.finish in ("", "stop")
    for number, tokens in made.items():
        if number == 1:
            continue  # the others' grammar is not its
        found = json.loads(text.decode(tokens))
        assert found.keys() == {"name", "size"} and found["size"] in ("small", "large") and len(found["name"]) <= 8
    # an engine that goes on where another died goes on in the same place of the grammar
    again = served(folder, words)
    first = made[4][:5]
    how = Sampling(temperature=2.0, seed=4, schema=schema)
    prompt = (*text.encode("say " * 5), *first)
    again.submit(Prompted(number=0, prompt=prompt, limit=75, sampling=how, answered=5))
    rest = [token for _ in range(200) if not again.idle for piece in again.step() for token in piece.tokens]
    assert first + rest == made[4]
