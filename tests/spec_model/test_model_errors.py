"""Wrong configurations: refused with every fault, its place and the way to mend it, and never a traceback."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.errors import MeshwrightError
from meshwright.spec.families import READERS
from meshwright.spec.families.refused import MISSING
from meshwright.spec.model import Model, _entry_config, from_config, load, transformer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def codes(error: MeshwrightError) -> list[str]:
    return [d.code for d in error.diagnostics]


def refusal(config: object) -> MeshwrightError:
    with pytest.raises(MeshwrightError) as caught:
        from_config(config, name="mine", place="config.json")
    return caught.value


def test_all_faults_come_in_one_error_with_place_and_help() -> None:
    error = refusal(
        {**LLAMA, "num_hidden_layers": 2.0, "vocab_size": "100", "num_key_value_heads": 3, "intermediate_size": -1}
    )
    assert sorted(codes(error)) == ["M002", "M002", "M002", "M003"]
    text = str(error)
    assert "config.json: num_hidden_layers = 2.0\n  help: write 2" in text
    assert "config.json: vocab_size = '100'\n  help: write 100 without quotes" in text
    assert "num_key_value_heads=3 does not divide num_attention_heads=4 (mine)" in text
    assert "config.json: intermediate_size = -1" in text


def test_a_misspelled_key_is_missing_and_its_neighbour_is_suggested() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "intermediate_size"} | {"intermediate_sise": 128}
    error = refusal(config)
    assert codes(error) == ["M001"]
    assert "did you mean intermediate_sise?" in str(error)


def test_a_null_dimension_is_refused_as_null() -> None:
    assert "intermediate_size is null" in str(refusal({**LLAMA, "intermediate_size": None}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5, True, 0, -4, "64", [64], {}, 10**30])
def test_a_hidden_size_that_is_not_a_positive_whole_number_is_refused(value: object) -> None:
    assert codes(refusal({**LLAMA, "hidden_size": value})) == ["M002"]


def test_a_number_of_thousands_of_digits_is_refused_without_being_printed() -> None:
    assert "hidden_size = a value too large to show" in str(refusal({**LLAMA, "hidden_size": 10**6000}))


def test_heads_must_divide_the_width_unless_the_head_has_a_width_of_its_own() -> None:
    assert codes(refusal({**LLAMA, "hidden_size": 66})) == ["M003"]
    assert from_config({**LLAMA, "hidden_size": 66, "head_dim": 16}).block(0).attention.head_dim == 16


def test_more_experts_per_token_than_experts_are_refused() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}
    assert "num_experts_per_tok=5 is larger than num_local_experts=4" in str(refusal(config))


def test_a_list_per_layer_must_have_one_entry_per_layer() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 3}
    assert "layer_types has 3 entries for 2 layers" in str(refusal(config))


def test_a_linear_attention_layer_in_a_known_family_is_refused() -> None:
    config = {**LLAMA, "model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]}
    assert codes(refusal(config)) == ["M005"]


def test_an_unknown_architecture_names_itself_and_the_known_families() -> None:
    error = refusal({**LLAMA, "model_type": "lama", "architectures": ["LamaForCausalLM"]})
    assert codes(error) == ["M004"]
    assert "LamaForCausalLM" in str(error) and "did you mean llama" in str(error) and "deepseek_v3" in str(error)


@pytest.mark.parametrize("family", sorted(MISSING))
def test_what_is_not_modelled_is_refused_by_name_with_the_missing_part(family: str) -> None:
    error = refusal({**LLAMA, "model_type": family})
    assert codes(error) == ["M005"]
    assert MISSING[family] in str(error)


def test_a_model_without_a_language_head_is_refused() -> None:
    assert codes(refusal({**LLAMA, "architectures": ["LlamaForSequenceClassification"]})) == ["M004"]


def test_the_class_name_decides_over_the_model_type() -> None:
    assert codes(refusal({**LLAMA, "architectures": ["KimiLinearForCausalLM"]})) == ["M005"]


@pytest.mark.parametrize("config", [None, [], "llama", 3, {}])
def test_what_is_no_configuration_is_refused(config: object) -> None:
    assert codes(refusal(config))[0] in ("M004", "M007")


def test_an_unknown_name_suggests_its_neighbours() -> None:
    with pytest.raises(MeshwrightError, match=r"did you mean .*llama3-70b") as caught:
        load("llama3-70")
    assert codes(caught.value) == ["M006"]


@pytest.mark.parametrize("name", ["", "\0", "x" * 5000, "~nobody-at-all/model", "no/such/folder"])
def test_a_name_that_no_system_knows_is_an_unknown_model(name: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        load(name)
    assert codes(caught.value) == ["M006"]


def test_an_override_without_effect_is_refused_with_the_familys_spelling() -> None:
    with pytest.raises(MeshwrightError, match="did you mean num_hidden_layers") as caught:
        load("llama3-8b", num_layers=2)
    assert codes(caught.value) == ["M008"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b"9" * 5000, b"[" * 100_000, b'"text"'],
)
def test_an_unreadable_file_is_refused(content: bytes, tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(MeshwrightError) as caught:
        load(file)
    assert codes(caught.value) == ["M007"]


def test_a_folder_without_a_configuration_is_said(tmp_path) -> None:
    with pytest.raises(MeshwrightError, match=r"no config\.json in the folder") as caught:
        load(f"{tmp_path}/")
    assert codes(caught.value) == ["M007"]


def test_a_byte_order_mark_is_no_fault(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert load(file).hidden == 64


def test_nan_in_a_file_is_refused_where_the_shape_depends_on_it_and_only_there(tmp_path) -> None:
    # Nemotron 3's published configuration has "time_step_limit": [0.0, Infinity]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "time_step_limit": [0.0, math.inf]}), encoding="utf-8")
    assert load(file).unknown_fields == ("time_step_limit",)
    file.write_text(json.dumps({**LLAMA, "vocab_size": math.nan}), encoding="utf-8")
    with pytest.raises(MeshwrightError, match="vocab_size must be a whole number"):
        load(file)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(MeshwrightError) as caught:
        load("nowhere/config.json")
    assert codes(caught.value) == ["M007"]


def test_dimensions_are_refused_together() -> None:
    with pytest.raises(MeshwrightError) as caught:
        transformer(layers=2.0, hidden=0, heads=True, vocab="100")
    assert codes(caught.value) == ["M002"] * 4
    with pytest.raises(MeshwrightError) as caught:
        transformer(layers=2, hidden=66, heads=4, kv_heads=3, vocab=100, gated=True, top_k=2)
    assert sorted(codes(caught.value)) == ["M001", "M003", "M003", "M003"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
CONFIGS = [dict(_entry_config(name)) for name in catalog.names("models")]
KEYS = sorted({key for config in CONFIGS for key in config} | {"text_config", "layer_types", "mlp_only_layers"})
FAMILIES = st.sampled_from(sorted(READERS)) | st.sampled_from(sorted(MISSING)) | st.text(max_size=5)


def is_model_or_refusal(config: object) -> bool:
    try:
        return isinstance(from_config(config), Model)
    except MeshwrightError as error:
        return all(d.code.startswith("M") for d in error.diagnostics) and bool(str(error))


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_any_json_is_a_model_or_a_refusal(value: object) -> None:
    assert is_model_or_refusal(value)


@given(FAMILIES, st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), JSON | st.integers(-2, 9), max_size=30))
@settings(max_examples=400, deadline=None)
def test_any_values_under_any_keys_of_any_family_are_a_model_or_a_refusal(family: str, config: dict) -> None:
    assert is_model_or_refusal({"model_type": family, **config})


@given(st.sampled_from(CONFIGS), st.data())
@settings(max_examples=400, deadline=None)
def test_a_real_configuration_with_changed_values_is_a_model_or_a_refusal(config: dict, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3))
    changed = config | {key: data.draw(JSON | st.integers(-1, 300)) for key in keys}
    assert is_model_or_refusal(changed)
    assert is_model_or_refusal({k: v for k, v in config.items() if k not in keys})
    assert is_model_or_refusal({"text_config": json.loads(json.dumps(config)) | {k: changed[k] for k in keys}})


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 9}


@pytest.mark.parametrize(
    ("config", "key", "near"),
    [
        ({**LLAMA, "hidden_act": "banana"}, "hidden_act", "known: geglu"),
        ({**LLAMA, "hidden_act": "sillu"}, "hidden_act", "did you mean silu"),
        ({**GPT2, "activation_function": "gelu2"}, "activation_function", "did you mean gelu"),
    ],
)
def test_an_activation_nobody_knows_is_refused_with_the_nearest(config, key, near) -> None:
    (found,) = refusal(config).diagnostics
    assert (found.code, f"{key} names no activation" in found.message) == ("M002", True)
    assert near in found.help


def test_a_folder_without_a_configuration_is_said_to_be_a_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "adir").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeshwrightError, match=r"M007.*no config.json in the folder 'adir'"):
        load("adir")
