"""Conversations: the text of the model's template, and loss of an assistant's tokens alone."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.errors import MeshwrightError
from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.spec.workload import Train

WORDS = ["?", "<user>", "<bot>", "</s>", "<end>", "hi", "there", "how", "are", "you", "fine", "bye", "<sys>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot> {{ m.content }} <end> "
    "{% elif m.role == 'system' %}<sys> {{ m.content }} {% else %}<user> {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
#: Two conversations, with the words that are learnt marked by a capital L, by hand.
TALKS = [
    [("user", "hi there"), ("assistant", "how are you"), ("user", "fine"), ("assistant", "bye")],
    [("system", "fine"), ("user", "you"), ("assistant", "hi")],
]
IDS = [
    "<user> hi there <bot> how are you <end> <user> fine <bot> bye <end> </s>",
    "<sys> fine <user> you <bot> hi <end> </s>",
]
LEARNT = ["----LLLL---LL-", "-----LL-"]


def model(folder, template=TEMPLATE):
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def messages(talk):
    return [{"role": role, "content": text} for role, text in talk]


def written(folder, talks=TALKS, key="messages"):
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps({key: messages(talk)}) + "\n" for talk in talks))
    return file


def built(tmp_path, name, words, **train):
    folder = data.build(str(name), tokenizer.load(words), tmp_path / "cache")
    return data.load(folder, Train(**({"global_batch": 1, "seq_len": 4} | train)), vocab=len(WORDS))


def by_hand():
    ids = [WORDS.index(word) for line in IDS for word in line.split()]
    return ids, [mark == "L" for line in LEARNT for mark in line]


@pytest.mark.parametrize("key", ["messages", "conversation"])
def test_an_answer_and_its_end_are_learnt_and_nothing_else(key, tmp_path):
    name = written(tmp_path, key=key)
    made = built(tmp_path, name if key == "messages" else f"{name}#{key}", model(tmp_path / "m"))
    ids, learnt = by_hand()
    assert made.tokens.tolist() == ids
    assert made.learnt.astype(bool).tolist() == learnt
    assert made.starts.tolist() == [0, len(LEARNT[0])]


@pytest.mark.parametrize("dp", [1, 2])
def test_batches_say_what_is_learnt_and_how_much_of_it_all_ranks_have(dp, tmp_path):
    made = built(tmp_path, written(tmp_path), model(tmp_path / "m"), global_batch=2)
    ids, learnt = map(np.array, by_hand())
    for step in range(3):
        whole = made.batch(step)
        for index in range(dp):
            part = made.batch(step, index, dp)
            assert part.num_targets == whole.num_targets == int((whole.targets >= 0).sum())
        for row, targets in zip(whole.tokens.tolist(), whole.targets.tolist()):
            at = next(i for i in range(0, len(ids) - 4, 4) if ids[i : i + 5].tolist() == row)
            assert targets == [int(t) if mark else -1 for t, mark in zip(ids[at + 1 : at + 5], learnt[at + 1 : at + 5])]


def test_packed_rows_have_the_same_targets(tmp_path):
    made = built(tmp_path, written(tmp_path), model(tmp_path / "m"), global_batch=2, seq_len=16, pack="packed")
    batch = made.batch(0)
    ids, learnt = by_hand()
    expected = sorted(one for one, mark in zip(ids, learnt) if mark)
    assert sorted(t for t in batch.targets.flatten().tolist() if t >= 0) == expected
    assert batch.num_targets == len(expected)


def test_another_template_makes_another_corpus_and_a_file_beside_counts_first(tmp_path):
    name, words = written(tmp_path), model(tmp_path / "m")
    first = data.build(str(name), tokenizer.load(words), tmp_path / "cache")
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE.replace("<sys>", "<user>"))
    second = data.build(str(name), tokenizer.load(words), tmp_path / "cache")
    assert first != second
    assert data.load(second, Train(global_batch=1, seq_len=4), vocab=13).tokens[14] == WORDS.index("<user>")


@pytest.mark.parametrize(
    "talks, template, code, said",
    [
        (TALKS, None, "D008", "no chat_template"),
        (TALKS, "{% for %}", "D008", "none of Jinja's"),
        (TALKS, "{{ messages[-1].content }}", "D008", "changes the text before it"),
        (TALKS, "{{ raise_exception('roles must alternate') }}", "D003", "roles must alternate"),
        (TALKS, "{{ messages.__class__.__mro__ }}", "D003", "unsafe"),
        ([[("user", "hi")]], TEMPLATE, "D003", "no message is an assistant's"),
        ([[("user", None), ("assistant", "hi")]], TEMPLATE, "D003", "message 0 has no text"),
        ([[(3, "hi")]], TEMPLATE, "D003", "message 0 has no role"),
        ([TALKS[0], []], TEMPLATE, "D003", "no list of messages"),
    ],
)
def test_conversations_that_cannot_be_laid_out_are_one_error(talks, template, code, said, tmp_path):
    name = written(tmp_path, talks)
    with pytest.raises(MeshwrightError) as error:
        data.build(str(name), tokenizer.load(model(tmp_path / "m", template)), tmp_path / "cache")
    (found,) = error.value.diagnostics
    assert found.code == code and said in found.message
    with pytest.raises(MeshwrightError, match=r"D008.*bytes has none"):
        data.build(str(written(tmp_path)), tokenizer.load("bytes"), tmp_path / "cache")


def test_the_text_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from meshwright.run.data.chat import Template

    model(tmp_path / "m")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    for talk in TALKS:
        ours = Template(tmp_path / "m").conversation(messages(talk), "")
        assert ours.text == theirs.apply_chat_template(messages(talk), tokenize=False)
