"""Comments of exported files: one behind every key, and nothing that a reader would take for the configuration."""

import pytest

from meshwright.export import TARGETS, target
from meshwright.export.comments import commented
from tests.export import test_accelerate, test_megatron, test_torchtitan, test_torchtitan_toml
from tests.export.questions import ask

#: Where a key holds other keys or an expression of the file's own, its line needs no comment.
STRUCTURE = {
    "torchtitan": {"model_spec", "loss", "loss_fn", "global_vocab_size", "dataloader", "dataset", "training",
                   "parallelism", "compile", "attn_backend", "converters"},
    "torchtitan-toml": set(),
    "megatron": set(),
    "accelerate": {"fsdp_config", "parallelism_config", "deepspeed_config", "fp8_config"},
}  # fmt: skip
CASES = {
    "torchtitan": test_torchtitan.CASES,
    "torchtitan-toml": test_torchtitan_toml.CASES,
    "megatron": test_megatron.CASES,
    "accelerate": test_accelerate.CASES,
}


@pytest.mark.parametrize("name", CASES)
def test_every_key_of_every_file_is_explained_behind_it(name):
    keys = {key for section in target(name).keys.values() for key in section} - STRUCTURE[name]
    for question in CASES[name]:
        for line in ask(name, *question).text.splitlines():
            words = line.replace("=", " ").replace(":", " ").split()
            key = words[0].strip('"') if words else ""
            if key in keys and not line.startswith("#"):
                assert "  # " in line, line


@pytest.mark.parametrize("name", TARGETS)
def test_every_comment_is_for_a_key_of_the_target(name):
    about = target(name)
    known = {key for section in about.keys.values() for key in section}
    known |= {f"{section}.{key}" for section, keys in about.keys.items() for key in keys}
    assert about.comments.keys() - known == set()
    assert all(text.isprintable() and len(text) < 80 for text in about.comments.values())


def test_a_comment_stands_behind_its_key_alone():
    text = '[model]\nname = "a"\nname_of = 1\n[optimizer]\nname = "b"\n# name = "c"\n"name": 2\nnames\n'
    assert commented(text, {"name": "X", "model.name": "Y"}) == (
        '[model]\nname = "a"  # Y\nname_of = 1\n[optimizer]\nname = "b"  # X\n# name = "c"\n"name": 2  # X\nnames\n'
    )
