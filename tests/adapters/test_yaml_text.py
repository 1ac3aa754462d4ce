"""YAML is read by one reader: the words of YAML 1.2, and refused in a sentence."""

import math
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.yaml_text import YamlError, read_yaml, write_yaml
from tests.support.processes import ROOT

WORDS = {
    "on": "on",
    "off": "off",
    "No": "No",
    "=": "=",
    "2024-01-01": "2024-01-01",
    "1:30": "1:30",
    "1_000": "1_000",
    "'012'": "012",
    "!!str 12": "12",
    "١٢": "١٢",
    "true": True,
    "~": None,
    "": None,
    "0x1F": 31,
    "0o17": 15,
    "-7": -7,
    "1e3": 1000.0,
    "1e-5": 1e-5,
    ".5": 0.5,
    "-.inf": -math.inf,
    "!!float 12": 12.0,
}


def test_words_are_those_of_yaml_1_2_and_keys_are_text_as_it_stands() -> None:
    for word, value in WORDS.items():
        read = read_yaml(f"key: {word}")["key"]
        assert (read, type(read)) == (value, type(value)), word
    assert [*read_yaml("{on: 1, 3: 4, null: 5, 012: 6}")] == ["on", "3", "null", "012"]


def test_files_of_other_programs_may_be_read_with_the_truth_values_of_yaml_1_1() -> None:
    text = "[on, Off, YES, no, y, true]"
    assert read_yaml(text, older=True) == [True, False, True, False, "y", True]


def test_an_alias_stands_for_its_value_and_a_merged_key_below_those_that_are_written() -> None:
    text = (
        "base: &base {a: 1, 2: 2}\nin: {its: &own {<<: *base, a: 3}}\n"
        "other: {<<: [*own, {c: 3, a: 9}], 2: 4}\nagain: *base"
    )
    read = read_yaml(text)
    assert read["in"]["its"] == {"a": 3, "2": 2}
    assert read["other"] == {"a": 3, "2": 4, "c": 3}
    assert read["again"] == {"a": 1, "2": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]", "column 4: found unconstructable recursive node"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key a is there twice"),
        ("a" * 1_000_001, "it has 1,000,001 letters, and 1,000,000 are read at most"),
        ("a: 1\n---\nb: 2", "expected a single document in the stream, but"),
        ("a: !!python/object:os.system x", "could not determine a constructor for the tag"),
        ("a:\n\t- b", "line 2, column 1: while scanning for the next token, found char"),
        ("a: \x01", "characters are not allowed"),
    ],
)
def test_what_is_no_yaml_is_refused_in_a_sentence_with_its_line(text: str, said: str) -> None:
    with pytest.raises(YamlError, match=said) as refused:
        read_yaml(text)
    assert "\n" not in str(refused.value)


WRITTEN = ["a", "- ", ": ", "{", "&a ", "!x ", "'", "|\n", "\n", " ", "#", "---\n", "012", "089"]
WRITTEN += ["1e3", "0x1", "0o7", ".5", "-", "~", "null", "yes", "1:30", "\ufeff", "\x85", "=", "<<"]
TEXTS = st.lists(st.sampled_from(WRITTEN), max_size=30).map("".join) | st.text(max_size=40)
NUMERALS = st.text(alphabet="0123456789.eE+-_:oxnyOfN~", max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | NUMERALS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_written_is_read_again_by_readers_of_both_versions(value: Any) -> None:
    text = write_yaml(value)
    assert read_yaml(text) == value
    assert yaml.safe_load(text) == value


def test_the_projects_own_files_say_the_same_to_the_reader_of_prefect() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.yaml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        text = (ROOT / name).read_text(encoding="utf-8")
        if "$recipe" not in text and "trinity.yaml" not in name:
            assert read_yaml(text) == yaml.safe_load(text), name
