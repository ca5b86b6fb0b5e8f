"""The routes: OpenAI's shapes, every form of a prompt, and errors that name field and reason."""

import json

import msgspec
import pytest
from fuzz.fake_engine import END, FakeEngine, token
from fuzz.fake_model import write_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from meshwright.endpoint.front import Limits
from meshwright.endpoint.text import ModelText
from tests.endpoint.local import app, client, events

HELLO = {"model": "tiny", "prompt": "hello world", "max_tokens": 6, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}


def expected(folder, prompt, count, seed=0):
    """The text of the fake engine's rule, decoded at once, and its ids up to the end token."""
    ids = []
    while len(ids) < count and (not ids or ids[-1] != END):
        ids.append(token(prompt, len(ids), seed))
    return ModelText(folder).decode([id for id in ids if id != END]), ids


def ask(served, path="/v1/completions", **body):
    return served.post(path, json=body)


def test_a_completion_is_the_engine_s_tokens_as_text_with_its_counts(served, folder):
    prompt = ModelText(folder).encode("hello world")
    text, ids = expected(folder, prompt, 6)
    found = ask(served, **HELLO).json()
    (choice,) = found["choices"]
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    assert found["usage"]["prompt_tokens"] == len(prompt) == 4  # <s> hello Ġworl d
    assert found["usage"]["completion_tokens"] == len(ids) and found["usage"]["total_tokens"] == 4 + len(ids)
    assert found["object"] == "text_completion" and found["id"].startswith("cmpl-") and found["model"] == "tiny"


def test_a_prompt_may_be_a_text_texts_tokens_or_lists_of_tokens(served, folder):
    ids = list(ModelText(folder).encode("hello world"))
    texts = []
    for prompt in ("hello world", ["hello world"], ids, [ids]):
        texts += [choice["text"] for choice in ask(served, **HELLO | {"prompt": prompt}).json()["choices"]]
    assert len(texts) == 4 and len(set(texts)) == 1
    several = ask(served, **HELLO | {"prompt": [ids, ids[:2]], "n": 2, "temperature": 1, "seed": 5}).json()["choices"]
    rule = [expected(folder, tuple(prompt), 6, seed)[0] for prompt in (ids, ids[:2]) for seed in (5, 6)]
    assert [one["text"] for one in several] == rule and [one["index"] for one in several] == [0, 1, 2, 3]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_text_of_the_whole_answer_and_counts_where_they_are_wanted(served, path):
    body = HELLO if path == "/v1/completions" else CHAT
    whole = ask(served, path, **body).json()
    answer = ask(served, path, **body, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(answer)
    parts = [chunk["choices"][0] for chunk in chunks]
    said = [part["text"] if "text" in part else part["delta"].get("content", "") for part in parts]
    (choice,) = whole["choices"]
    assert "".join(said) == (choice["text"] if "text" in choice else choice["message"]["content"])
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    assert last["choices"] == [] and last["usage"] == whole["usage"] and all(c["usage"] is None for c in chunks)
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    if path != "/v1/completions":
        assert parts[0]["delta"]["role"] == "assistant" and "role" not in parts[1]["delta"]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_is_laid_out_by_the_model_s_own_template(served, folder):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    ids = ModelText(folder).encode("<s>[system]be[user]hi[assistant]", special=False)
    found = ask(served, "/v1/chat/completions", messages=messages, max_completion_tokens=6, temperature=0).json()
    assert found["choices"][0]["message"]["content"] == expected(folder, ids, 6)[0]
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert tuple(ask(served, "/tokenize", messages=messages).json()["tokens"]) == ids


def test_an_answer_ends_at_the_end_token_unless_it_is_ignored_or_too_early(served, folder):
    prompt = next(p for i in range(2, 250) if END in expected(folder, p := (0, i), 40)[1])
    _, ids = expected(folder, prompt, 40)
    asked = {"prompt": list(prompt), "max_tokens": 40, "temperature": 0}
    found = ask(served, **asked).json()
    assert found["choices"][0]["finish_reason"] == "stop" and found["usage"]["completion_tokens"] == len(ids)
    for more in ({"ignore_eos": True}, {"min_tokens": 40}):
        assert ask(served, **asked, **more).json()["usage"]["completion_tokens"] == 40
    stop = ids[2]
    found = ask(served, **asked, stop_token_ids=[stop]).json()
    assert found["usage"]["completion_tokens"] == ids.index(stop) + 1
    assert found["choices"][0]["text"] == ModelText(folder).decode(ids[: ids.index(stop)])


def test_a_stop_string_cuts_the_answer_and_ends_it_at_the_engine(folder):
    engine = FakeEngine()
    with client(app(folder, engine=engine)) as served:
        text = ask(served, **HELLO | {"max_tokens": 60, "ignore_eos": True}).json()["choices"][0]["text"]
        stop = next(text[i : i + 2] for i in range(4, 40) if text[i : i + 2].isascii() and text[i].isalnum())
        found = ask(served, **HELLO | {"max_tokens": 60, "ignore_eos": True, "stop": ["never", stop]}).json()
        kept = {"include_stop_str_in_output": True, "stream": True, "stop": stop, "max_tokens": 60, "ignore_eos": True}
        parts = events(ask(served, **HELLO | kept))
    assert found["choices"][0]["text"] == text[: text.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop" and found["usage"]["completion_tokens"] < 60
    assert "".join(part["choices"][0]["text"] for part in parts) == text[: text.index(stop) + 2]
    assert engine.idle and engine.figures().blocks_used == 0


def test_scores_have_openai_s_shapes_and_those_of_the_prompt_come_with_echo(served, folder):
    words = ModelText(folder)
    ids = words.encode("hello world")
    text, made = expected(folder, ids, 6)
    (choice,) = ask(served, **HELLO, logprobs=2, echo=True).json()["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "hello world" + text
    assert scores["tokens"] == [words.token(id) for id in (*ids, *made)]
    assert scores["token_logprobs"] == [None] + [-0.5] * (len(ids) + len(made) - 1)
    assert scores["top_logprobs"][0] is None and len(scores["top_logprobs"][-1]) == 2
    assert len(scores["text_offset"]) == len(scores["tokens"]) and scores["text_offset"][len(ids)] == len("hello world")
    (choice,) = ask(served, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=3).json()["choices"]
    first = choice["logprobs"]["content"][0]
    assert first["logprob"] == -0.5 and len(first["top_logprobs"]) == 3 and bytes(first["bytes"]).decode()
    assert ask(served, **HELLO).json()["choices"][0]["logprobs"] is None


def test_a_prompt_is_scored_without_a_new_token(served):
    found = ask(served, **HELLO | {"max_tokens": 0, "echo": True, "logprobs": 0}).json()
    (choice,) = found["choices"]
    assert choice["text"] == "hello world" and len(choice["logprobs"]["tokens"]) == 4
    assert found["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"


def test_text_becomes_tokens_and_tokens_text(served, folder):
    found = ask(served, "/tokenize", prompt="hello world", return_token_strs=True).json()
    assert tuple(found["tokens"]) == ModelText(folder).encode("hello world") and found["count"] == 4
    assert found["max_model_len"] == 512 and found["token_strs"] == ["<s>", "hello", " worl", "d"]
    assert ask(served, "/detokenize", tokens=found["tokens"][1:]).json() == {"prompt": "hello world"}
    assert len(ask(served, "/tokenize", prompt="hello", add_special_tokens=False).json()["tokens"]) == 1


def test_a_long_prompt_is_made_tokens_beside_other_requests(folder):
    with client(app(folder, engine=FakeEngine(context=100_000, blocks=50_000))) as served:
        found = ask(served, prompt="hello world" * 8000, max_tokens=1, temperature=0).json()  # 88 kB
        assert found["usage"]["prompt_tokens"] == len(ModelText(folder).encode("hello world" * 8000))


def test_models_are_listed_with_their_adapters_and_asked_by_either_name(served, folder):
    names = [one["id"] for one in served.get("/v1/models").json()["data"]]
    assert names == ["tiny", "tuned"] and served.get("/v1/models/tuned").json()["parent"] == "tiny"
    assert ask(served, **HELLO | {"model": "tuned"}).json()["model"] == "tuned"
    assert ask(served, **HELLO | {"model": str(folder)}).status_code == 200
    assert served.get("/v1/models/other").status_code == 404


def test_figures_have_the_names_that_dashboards_of_vllm_read(folder):
    with client(app(folder)) as served:
        assert ask(served, **HELLO | {"ignore_eos": True}).status_code == 200
        assert ask(served, prompt=3).status_code == 400
        text = served.get("/metrics").text
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert values["vllm:generation_tokens_total"] == 6 and values["vllm:prompt_tokens_total"] == 4
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:time_to_first_token_seconds_count"] == values["vllm:e2e_request_latency_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 5  # gaps between six tokens
    assert values["vllm:request_success_total"] == values["meshwright:requests_refused_total"] == 1
    assert {"vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"} <= values.keys()


#: Body -> status, field and a word of the reason.
WRONG = [
    ({"prompt": 3}, 400, "prompt", "Expected"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [1, "a"]}, 400, "prompt", "mixes"),
    ({"prompt": [99999]}, 400, "prompt", "none of the 266"),
    ({"prompt": [[]]}, 400, "prompt", "no tokens"),
    ({}, 400, "prompt", "missing"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", ">= 0"),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "int"),
    ({"prompt": "a", "max_tokens": 512}, 400, "max_tokens", "512"),
    ({"prompt": "a" * 600}, 400, "prompt", "601 tokens"),
    ({"prompt": "a", "temperature": -0.1}, 400, "temperature", ">= 0"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature", "float"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p", "> 0"),
    ({"prompt": "a", "n": 129}, 400, "n", "<= 128"),
    ({"prompt": ["a", "b"], "n": 128}, 400, "n", "128"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens", "max_tokens=3"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "20"),
    ({"prompt": "a", "stop": [""]}, 400, "stop", "1 to"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "16"),
    ({"prompt": "a", "stop_token_ids": [266]}, 400, "stop_token_ids", "none of"),
    ({"prompt": "a", "best_of": 2}, 400, "best_of", "best_of"),
    ({"prompt": "a", "stream_options": {}}, 400, "stream_options", "stream: true"),
    ({"prompt": "a", "stream_options": {"usage": True}}, 400, "stream_options.usage", "include_usage"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "model", "tiny, tuned"),
    ({"prompt": "a", "temprature": 1}, 400, "temprature", "did you mean temperature"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias", "<= 100"),
    ({"prompt": "a", "logit_bias": {"-5": 1}}, 400, "logit_bias", "no token's number"),
    ({"prompt": "a", "logit_bias": {"266": 1}}, 400, "logit_bias", "none of the 266"),
    ({"prompt": "a", "presence_penalty": 2.5}, 400, "presence_penalty", "<= 2"),
    ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "> 0"),
    ({"prompt": "a", "response_format": {"type": "yaml"}}, 400, "response_format.type", "yaml"),
    ({"prompt": "a", "seed": 2**64}, 400, "seed", "<= "),
]


@pytest.mark.parametrize("body, status, field, reason", WRONG, ids=[f"{w[2]}-{i}" for i, w in enumerate(WRONG)])
def test_what_is_wrong_with_a_request_is_said_with_its_field(served, body, status, field, reason):
    answer = served.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, field) and reason in error["message"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages, field",
    [
        ([], "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ],
)
def test_messages_that_are_none_are_refused(served, messages, field):
    answer = ask(served, "/v1/chat/completions", messages=messages)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "data, code",
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt": "\xff\xfe"}', "invalid_utf8"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b'{"prompt":' * 100_000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
    ],
)
def test_a_body_that_is_no_json_is_refused(served, data, code):
    answer = served.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == code
    assert ask(served, **HELLO).status_code == 200


def test_another_path_method_or_type_is_an_error_of_the_same_shape(served):
    for answer, status in (
        (served.get("/v1/nothing"), 404),
        (served.get("/v1/completions"), 405),
        (served.delete("/health"), 405),
        (served.post("/v1/completions", content=b"prompt=a"), 415),
    ):
        assert answer.status_code == status and answer.json()["error"]["message"]
    assert served.get("/v1/completions").headers["allow"] == "POST"


def test_a_model_without_a_template_or_whose_template_refuses_says_so(tmp_path):
    refusing = "{{ raise_exception('roles must alternate') }}"
    with client(app(write_tokenizer(tmp_path, template=refusing))) as served:
        answer = ask(served, "/v1/chat/completions", **CHAT)
    assert answer.status_code == 400 and "roles must alternate" in answer.json()["error"]["message"]
    made = app(write_tokenizer(tmp_path, template=refusing))
    made.served = type(made.served)(text=made.served.text, template=None, names=made.served.names)
    with client(made) as served:
        assert ask(served, "/v1/chat/completions", **CHAT).json()["error"]["code"] == "no_chat_template"


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOOLED = "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
TOOLED += "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
CALL = 'It is\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_laid_out_by_the_template_and_read_by_a_named_parser(tmp_path, stream):
    made = app(write_tokenizer(tmp_path, template=TOOLED))
    made.served = msgspec.structs.replace(made.served, tool_parser="hermes")
    engine, ids = made.engine.engine, made.served.text.encode(CALL, special=False)
    engine.answer = (*ids, 1)
    said = {"messages": CHAT["messages"], "tools": [WEATHER], "max_tokens": 200, "stream": stream}
    with client(made) as served:
        answer = ask(served, "/v1/chat/completions", **said)
        assert made.served.text.decode(engine.seen[-1].prompt) == "weather;[user]hi"
        if stream:
            deltas = [event["choices"][0] for event in events(answer)]
            text = "".join(one["delta"].get("content") or "" for one in deltas)
            (call,), finish = deltas[-1]["delta"]["tool_calls"], deltas[-1]["finish_reason"]
            assert call["index"] == 0
        else:
            choice = answer.json()["choices"][0]
            (call,), finish, text = (
                choice["message"]["tool_calls"],
                choice["finish_reason"],
                choice["message"]["content"],
            )
        assert (text, finish, call["function"]["name"]) == ("It is\n", "tool_calls", "weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Köln"} and call["type"] == "function"
        # the call goes back as it came, and what none is stays text
        engine.answer = (*made.served.text.encode("<tool_call>{", special=False), 1)
        more = [*said["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
        said |= {"messages": more, "stream": False}
        choice = ask(served, "/v1/chat/completions", **said).json()["choices"][0]
        assert choice["message"]["content"] == "<tool_call>{" and choice["finish_reason"] == "stop"
        assert made.served.text.decode(engine.seen[-1].prompt).endswith("[assistant]NoneKöln")


@pytest.mark.parametrize(
    "body, field, reason",
    [
        ({"tools": [WEATHER]}, "tools", "--tool-parser hermes"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "no grammar"),
        ({"tool_choice": "auto"}, "tool_choice", "beside tools"),
        ({"tools": [{"type": "web"}]}, "tools", "Invalid enum value"),
        ({"functions": [{}]}, "functions", "say tools"),
    ],
)
def test_tools_that_are_not_done_are_refused_with_what_to_say(served, body, field, reason):
    error = ask(served, "/v1/chat/completions", **CHAT | body).json()["error"]
    assert error["param"].startswith(field) and reason in error["message"]
    assert ask(served, "/v1/chat/completions", **CHAT, tools=[WEATHER], tool_choice="none").status_code == 200


def test_what_changes_scores_reaches_the_engine(served, folder):
    with client(app(folder, engine=(engine := FakeEngine()))) as found:
        said = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "min_p": 0.1}
        assert ask(found, **HELLO, **said, logit_bias={"5": -100, "7": 3}).status_code == 200
        sampling = engine.seen[-1].sampling
        assert {name: getattr(sampling, name) for name in said} == said
        assert sampling.logit_bias == ((5, -100.0), (7, 3.0)) and sampling.penalised


def test_every_key_is_a_tenant_and_no_key_is_401_but_for_probes(folder):
    engine = FakeEngine()
    with client(app(folder, engine=engine, keys=("one", "two"))) as served:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer three"}, 401),
            ({"Authorization": "Basic two"}, 401),
            ({"Authorization": "Bearer two"}, 200),
        ):
            answer = served.post("/v1/completions", json=HELLO, headers=headers)
            assert answer.status_code == status
        assert engine.seen[-1].tenant == 1
        answer = served.get("/v1/models")
        assert answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
        assert served.get("/health").status_code == served.get("/metrics").status_code == 200


def test_a_page_of_another_site_gets_nothing(served, folder):
    foreign = {"host": "evil.example"}
    assert served.get("/v1/models", headers=foreign).status_code == 421
    answer = served.post("/v1/completions", json=HELLO, headers={"origin": "http://evil.example"})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    with client(app(folder, host="0.0.0.0")) as opened:  # behind a name of its own, as an operator wants it
        assert opened.get("/v1/models", headers=foreign).status_code == 200


def test_a_body_may_not_be_longer_than_its_limit(folder):
    with client(app(folder, limits=Limits(body_bytes=1000))) as served:
        answer = ask(served, prompt="a" * 2000)
        assert answer.status_code == 413 and answer.headers["connection"] == "close"
        assert ask(served, **HELLO).status_code == 200


def test_what_the_benchmarks_of_vllm_and_sglang_send_is_answered(served, folder):
    ids = list(ModelText(folder).encode("hello world"))
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    neutral = {"repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True}
    vllm = {"model": "tiny", "prompt": "hello world", "max_tokens": 6, **neutral, **usage}
    *chunks, last = events(ask(served, **vllm))
    assert len(chunks) == 6 and last["usage"]["completion_tokens"] == 6  # a chunk a token, as ITL is counted
    old = {"model": "tiny", "prompt": "hello", "temperature": 0.0, "best_of": 1, "max_tokens": 6, "stream": True}
    assert all(chunk["choices"][0]["text"] is not None for chunk in events(ask(served, **old, use_beam_search=False)))
    content = [{"type": "text", "text": "hi"}]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_completion_tokens": 6, **usage}
    *chunks, last = events(ask(served, "/v1/chat/completions", **chat, ignore_eos=True))
    assert len(chunks) == 6 and last["usage"]["completion_tokens"] == 6
    sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    rest = {"lora_path": None, "return_logprob": False, "logprob_start_len": -1}
    native = {"input_ids": ids, "sampling_params": sampling, "stream": True, **rest}
    parts = events(ask(served, "/generate", **native))
    assert [part["meta_info"]["completion_tokens"] for part in parts] == [1, 2, 3, 4, 5, 6]
    assert parts[-1]["text"] == ask(served, **HELLO | {"ignore_eos": True}).json()["choices"][0]["text"]
    assert (
        json.loads(ask(served, "/generate", text="hello world", sampling_params=sampling).text)["text"]
        == parts[-1]["text"]
    )
