"""Tokens become text piece by piece: nothing is lost, no half character leaves, and stop strings are found anywhere."""

import random

import pytest
from fuzz.fake_model import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from meshwright.endpoint.text import BEFORE, LOST, WINDOW, Detokeniser, ModelText, StopCut
from meshwright.errors import MeshwrightError

SOME = st.text(st.sampled_from("ab hello world é中文😀\u0301\n"), max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(folder):
    return ModelText(folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    """A tokenizer of words marked by their space, whose other characters are bytes: as Llama 2's."""
    place = tmp_path_factory.mktemp("fallback")
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "a", "b", "▁hello"]
    reader = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], byte_fallback=True))
    reader.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    reader.save(str(place / "tokenizer.json"))
    return ModelText(place)


def streamed(text, ids, before=()):
    out = Detokeniser(text, before)
    parts = [out.add(id) for id in ids]
    return [*parts, out.end()]


@given(SOME)
@settings(max_examples=100, deadline=None)
def test_pieces_of_a_text_are_the_text_and_none_ends_in_half_a_character(text, said):
    ids = text.encode(said, special=False)
    parts = streamed(text, ids)
    assert "".join(parts) == text.decode(ids) == said
    assert all(LOST not in part for part in parts)


@given(st.lists(st.integers(2, 265), max_size=WINDOW))
@settings(max_examples=100, deadline=None)
def test_pieces_of_random_bytes_are_what_the_decoder_makes_of_all_of_them(text, ids):
    assert "".join(streamed(text, ids)) == text.decode(ids)


def test_a_character_in_an_endless_run_of_bytes_that_are_none_comes_out_whole(text):
    bad, whole = text.encode("é", special=False)[1], text.encode("😀", special=False)
    parts = streamed(text, [bad] * 500 + list(whole) + [bad] * 10)
    assert [part for part in parts if "😀" in part] and "".join(parts).count("😀") == 1
    assert 490 <= "".join(parts).count(LOST) <= 515  # 510 bytes that are none


@given(st.lists(st.integers(1, 261), max_size=24))
@settings(max_examples=100, deadline=None)
def test_no_text_is_lost_where_a_decoder_changes_its_mind(fallback, ids):
    whole, parts = fallback.decode(ids), "".join(streamed(fallback, ids))
    assert len(parts) >= len(whole) - 3 and parts[-1:] == whole[-1:]


def test_a_character_of_byte_tokens_waits_for_its_last_byte(fallback):
    ids = [258, *(1 + byte for byte in "中😀".encode()), 260]
    assert streamed(fallback, ids) == ["a", "", "", "中", "", "", "", "😀", "b", ""]


def test_an_answer_keeps_the_space_that_parts_it_from_its_prompt(fallback):
    assert "".join(streamed(fallback, [261, 260], before=(258,))) == " hellob"  # alone the decoder strips the space
    assert "".join(streamed(fallback, [261, 260])) == "hellob"
    assert "".join(streamed(fallback, [261], before=(258,) * 3 * BEFORE)) == " hello"


def test_a_token_costs_the_same_however_long_the_answer_is(text):
    out, sizes = Detokeniser(text), set()
    for id in random.Random(0).choices(range(2, 266), k=4000):
        out.add(id)
        sizes.add(len(out._ids))
    assert max(sizes) <= WINDOW + 1


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_stop_string_is_cut_wherever_tokens_part_it(cut):
    said, stop = "one two##three", "##"
    stops = StopCut([stop, "never"])
    parts = [stops.add(said[i : i + cut]) for i in range(0, len(said), cut)]
    assert "".join(parts) == "one two" and stops.found == stop and stops.end() == ""


@given(st.text("ab#", max_size=30), st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3), st.data())
@settings(max_examples=200, deadline=None)
def test_what_leaves_before_a_stop_string_is_what_a_search_in_the_whole_text_finds(said, stops, data):
    cut, out, at = StopCut(stops), "", 0
    while at < len(said) and not cut.found:
        step = data.draw(st.integers(1, 3))
        out, at = out + cut.add(said[at : at + step]), at + step
    seen = said[:at] if cut.found else said
    found = [place for stop in stops if (place := seen.find(stop)) >= 0]
    assert out + cut.end() == (said[: min(found)] if found else said)


def test_a_stop_string_may_be_kept():
    cut = StopCut(["##"], keep=True)
    assert cut.add("a#") + cut.add("#b") == "a##" and cut.add("c") == ""


def test_a_folder_without_a_tokenizer_is_one_error(tmp_path):
    for content in (None, "{}"):
        if content:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(MeshwrightError) as caught:
            ModelText(tmp_path)
        assert caught.value.diagnostics[0].code == "D004" and caught.value.diagnostics[0].help


def test_what_the_publisher_recommends_is_taken_where_it_samples(folder, tmp_path):
    write_tokenizer(tmp_path)
    said = tmp_path / "generation_config.json"
    for content, usual in (
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}', {"temperature": 0.6, "top_p": 0.9}),
        ('{"do_sample": false, "temperature": 0.6}', {}),
        ('{"temperature": "hot"}', {}),
        ("[]", {}),
    ):
        said.write_text(content)
        assert ModelText(tmp_path).usual == usual
