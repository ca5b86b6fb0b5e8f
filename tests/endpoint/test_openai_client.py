"""OpenAI's own client reads answers, streams and errors of the server."""

import openai
import pytest

from meshwright.endpoint.front import Limits
from tests.endpoint.local import app, client


def of(served, key="none", retries=0):
    """OpenAI's client, whose HTTP goes to the application in this process."""
    url = "http://127.0.0.1:8000/v1"
    return openai.OpenAI(base_url=url, api_key=key, http_client=served, max_retries=retries)


@pytest.fixture(scope="module")
def asked(served):
    return of(served)


def test_the_client_s_completions_and_chats_are_one_text_streamed_or_not(asked):
    same = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    whole = asked.completions.create(prompt="hello world", **same)
    *chunks, last = asked.completions.create(prompt="hello world", **same, **counted)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""
    assert last.usage == whole.usage and whole.usage.completion_tokens == 12
    messages = [{"role": "user", "content": "hello"}]
    chat = asked.chat.completions.create(messages=messages, **same, logprobs=True, top_logprobs=2)
    parts = asked.chat.completions.create(messages=messages, **same, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content
    assert chat.choices[0].finish_reason == "length" and chat.choices[0].message.role == "assistant"
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2


def test_the_client_lists_models(asked):
    assert [model.id for model in asked.models.list()] == ["tiny", "tuned"]
    assert asked.models.retrieve("tuned").id == "tuned"


def test_errors_are_the_client_s_typed_exceptions_with_field_and_reason(asked, folder):
    with pytest.raises(openai.NotFoundError) as unknown:
        asked.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.param == "model" and unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        asked.completions.create(model="tiny", prompt="a" * 600)
    assert long.value.code == "context_length_exceeded" and "601 tokens" in str(long.value)
    with pytest.raises(openai.BadRequestError) as wrong:
        asked.completions.create(model="tiny", prompt="a", max_tokens=-1)
    assert wrong.value.param == "max_tokens"
    made = app(folder, keys=("secret",), limits=Limits(running=1, queue=0))
    with client(made) as served:
        with pytest.raises(openai.AuthenticationError):
            of(served).models.list()
        with pytest.raises(openai.RateLimitError) as many:
            of(served, "secret").completions.create(model="tiny", prompt="a", n=2)
        assert many.value.response.headers["retry-after"] == "1"
        made.front.draining = True
        with pytest.raises(openai.InternalServerError) as draining:
            of(served, "secret").completions.create(model="tiny", prompt="a")
        assert draining.value.status_code == 503
