"""A serving workload in a file: its words are those of the command line, its clients lie on top of each other."""

import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.spec.serve import parse

MIX = """
format_version = 1
requests = 3000
seed = 7
ttft = "500ms@p90"
policy = "sarathi"

[[client]]
name = "chat"
rate = 6
prompt = 512
output = 128
turns = 3
think = "2s"
ttft = "200ms"

[[client]]
name = "jobs"
concurrency = 4
prompt = 4096
output = 64
requests = 400
priority = -1
adapters = 3
"""


def written(folder, text, name="mix.toml"):
    (folder / name).write_text(text)
    return folder


def refused(text, tmp_path):
    with pytest.raises(MeshwrightError) as caught:
        parse("mix.toml", base=written(tmp_path, text))
    return [(d.code, d.place) for d in caught.value.diagnostics]


def test_a_file_without_clients_is_the_words_it_says(tmp_path):
    written(
        tmp_path,
        'format_version = 1\nrate = 8\nprompt = "1k"\noutput = 256\ngraphs = false\nttft.1 = "1s"\npriority = 1\n',
    )
    found = parse("mix.toml", base=tmp_path)
    said = parse("rate=8,prompt=1024,output=256,graphs=no,priority=1,ttft.1=1s")
    assert found.drawn().arrival_s.tolist() == said.drawn().arrival_s.tolist()
    assert (found.engine, found.classes, found.rate) == (said.engine, said.classes, said.rate)


def test_a_file_and_the_words_put_over_it_are_read_back(tmp_path):
    written(tmp_path, MIX)
    for text in ("mix.toml", "mix.toml,policy=vllm-v1,requests=100", "mix.toml,ttft=1s,seed=0"):
        found = parse(text, base=tmp_path)
        assert parse(found.text(), base=tmp_path) == found
    assert parse("mix.toml,policy=vllm-v1", base=tmp_path).engine.policy == "vllm-v1"


def test_files_that_a_file_names_are_beside_it(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,6\n")
    written(tmp_path / "sub", 'format_version = 1\n[[client]]\ntrace = "t.csv"\n')
    assert parse("sub/mix.toml", base=tmp_path).drawn().prompt.tolist() == [5]


def test_clients_lie_on_top_of_each_other_as_tenants_of_their_own(tmp_path):
    found = parse("mix.toml", base=written(tmp_path, MIX)).drawn()
    chat, jobs = found.tenant == 0, found.tenant == 1
    assert len(found) == 3000 and jobs.sum() == 400 and chat.sum() == 2600
    assert set(found.output[chat]) == {128} and set(found.prompt[jobs]) == {4096}
    assert found.arrival_s[found.after < 0].min() == 0.0
    assert set(found.priority[jobs]) == {-1} and set(found.priority[chat]) == {0}
    assert set(found.adapter[jobs]) == {0, 1, 2} and set(found.adapter[chat]) == {-1}
    later = np.flatnonzero(found.after >= 0)
    assert (found.after[later] < later).all() and (found.tenant[found.after[later]] == found.tenant[later]).all()
    # four users, each with its next request when the last one is answered: no more than four wait for nobody
    assert (jobs & (found.after < 0)).sum() == 4
    assert not set(found.program[jobs]) & set(found.program[chat])


def test_objectives_of_a_client_are_those_of_its_requests(tmp_path):
    serve = parse("mix.toml", base=written(tmp_path, MIX))
    found = serve.drawn()
    bounds = [serve.objective_classes[i]["ttft_s"].seconds for i in found.slo]
    assert bounds == [0.2 if tenant == 0 else 0.5 for tenant in found.tenant]


def test_rates_of_clients_add_up_in_a_window(tmp_path):
    client = "\n[[client]]\nrate = {}\nprompt = 8\noutput = 8\ncv = {}\n"
    text = 'format_version = 1\nwindow = "1000s"\n' + client.format(20, 1) + client.format(10, 3)
    found = parse("mix.toml", base=written(tmp_path, text)).drawn()
    # 30 a second for 1000 s; the variance of a renewal count is cv^2 of its mean: 20,000 + 9 x 10,000, four times over
    assert abs(len(found) - 30_000) < 4 * np.sqrt(20_000 + 90_000)
    assert (np.diff(found.arrival_s) >= 0).all() and found.arrival_s[-1] < 1000


def test_a_draw_of_a_client_is_not_that_of_another(tmp_path):
    client = "\n[[client]]\nrate = 5\nprompt = 8\noutput = 8\nrequests = 50\n"
    found = parse("mix.toml", base=written(tmp_path, "format_version = 1\nrequests = 100" + client + client)).drawn()
    one, other = (found.arrival_s[found.tenant == i] for i in (0, 1))
    assert not np.array_equal(np.diff(one), np.diff(other))


def test_everything_wrong_with_a_file_is_said_at_once_with_its_client(tmp_path):
    text = """
format_version = 1
rate = 8
colour = "red"
[[client]]
name = "chat"
rate = 0
prompt = 8
output = 8
policy = "orca"
[[client]]
prompt = 8
"""
    assert refused(text, tmp_path) == [
        ("W005", "mix.toml chat policy=orca"),
        ("W002", "mix.toml chat rate=0"),
        ("W003", "mix.toml client 2"),
        ("W003", "mix.toml client 2"),
        ("W001", "mix.toml colour=red"),
        ("W005", "mix.toml"),
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("rate = 8", "X007"),
        ("format_version = 2", "X007"),
        ("format_version = true", "X007"),
        ("rate = ", "X006"),
        ("format_version = 1\nrate = [1, 2]", "X008"),
        ("format_version = 1\nclient = 3", "X008"),
        ('format_version = 1\nrate = "8,prompt=3"', "X008"),
        ("format_version = 1\n[[client]]\nrate = 1979-05-27", "X008"),
        ("format_version = 1\nttft.a.b = 1", "X008"),
    ],
)
def test_what_is_no_file_of_a_workload_is_refused(text, code, tmp_path):
    assert [found for found, _ in refused(text, tmp_path)] == [code]


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(MeshwrightError, match="X006"):
        parse("nowhere.toml,seed=1")


def test_a_window_in_which_nobody_asks_is_refused(tmp_path):
    text = 'format_version = 1\nwindow = "1us"\n[[client]]\nrate = 1\nprompt = 8\noutput = 8\n'
    with pytest.raises(MeshwrightError, match="no client asks"):
        parse("mix.toml", base=written(tmp_path, text)).drawn()
