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
    "yes": "yes",
    "No": "No",
    "y": "y",
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
    "null": None,
    "0x1F": 31,
    "0o17": 15,
    "-7": -7,
    "1e3": 1000.0,
    "1e-5": 1e-5,
    ".5": 0.5,
    "-.inf": -math.inf,
    "!!float 12": 12.0,
}


@pytest.mark.parametrize(("word", "value"), WORDS.items())
def test_words_are_those_of_yaml_1_2(word: str, value: object) -> None:
    read = read_yaml(f"key: {word}")["key"]
    assert (read, type(read)) == (value, type(value))


def test_keys_are_text_as_it_stands() -> None:
    assert read_yaml("{on: 1, off: 2, 3: 4, null: 5, 012: 6}") == {
        "on": 1,
        "off": 2,
        "3": 4,
        "null": 5,
        "012": 6,
    }


def test_files_of_other_programs_may_be_read_with_the_truth_values_of_yaml_1_1() -> None:
    text = "[on, Off, YES, no, y, true]"
    assert read_yaml(text, older=True) == [True, False, True, False, "y", True]


def test_an_alias_stands_for_its_value_and_a_merged_key_below_those_that_are_written() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: [*base, {c: 3, a: 9}], b: 4}\nagain: *base"
    read = read_yaml(text)
    assert read["other"] == {"a": 1, "b": 4, "c": 3}
    assert read["again"] == {"a": 1, "b": 2}


REFUSED = {
    "an alias of itself": ("a: &a [*a]", "column 4: found unconstructable recursive node"),
    "a merge of itself": ("a: &a {<<: *a}", "found unconstructable recursive node"),
    "brackets": ("[" * 5000, "column 51: values lie in each other more than 50 deep"),
    "dashes": ("- " * 5000, "more than 50 deep"),
    "digits": ("a: " + "9" * 6000, "column 4: 9+ is no number that can be read"),
    "many letters": ("x" * 1_000_001, "1,000,001 letters, and 1,000,000 are read at most"),
    "a key that is there twice": ("a: 1\nb: 2\na: 3", "line 3, column 1: the key a is there twice"),
    "an octal number": ("a: 012", "012 is octal in YAML 1.1 and decimal in YAML 1.2; write it"),
    "two documents": ("a: 1\n---\nb: 2", "expected a single document in the stream, but"),
    "a tag": ("a: !!python/object:os.system x", "a tag .* stands before a value"),
    "a tag of a mapping": ("!!map [a]", "a tag .* stands before a value"),
    "a tag of truth": ("!!bool x", "a tag .* stands before a value"),
    "a key of several": ("? [a]\n: 1", "a key is no text"),
    "a merge of text": ("<<: text", "<< merges a value that has no keys"),
    "a tab": ("a:\n\t- b", "line 2, column 1: while scanning for the next token, found char"),
    "NUL": ('a: "\\0"', "a text holds NUL"),
    "a control character": ("a: \x01", "letter 4 is not allowed in YAML"),
    "half a letter": ("a: \udc80", "half a letter"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_too_much_or_ambiguous_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(YamlError, match=said) as refused:
        read_yaml(text)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


PIECES = st.sampled_from(
    [
        *(
            "- ",
            "? ",
            ": ",
            "a",
            "b: ",
            "{",
            "}",
            "[",
            "]",
            ",",
            "&a ",
            "*a",
            "<<: ",
            "!!str ",
            "!x ",
        ),
        *("'", '"', "|\n", ">-\n", "\n", " ", "\t", "#", "---\n", "...\n", "%YAML 1.1\n", "012"),
        *(
            "1e3",
            "0x1",
            ".5",
            "-",
            "~",
            "null",
            "yes",
            "1:30",
            "\\x00",
            "\ufeff",
            "\x85",
            "=",
            ".NaN",
        ),
    ]
)
TEXTS = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=40)
NUMERALS = st.text(alphabet="0123456789.eE+-_:oxnyOfN~", max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | NUMERALS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(TEXTS)
def test_any_text_is_a_value_or_is_refused(text: str) -> None:
    try:
        read_yaml(text)
    except YamlError as refused:
        said = str(refused)
    else:
        said = ""
    assert "\n" not in said


@given(VALUES.filter(lambda value: "\\x00" not in repr(value)), st.booleans())
def test_what_is_written_is_read_again_by_readers_of_both_versions(value: Any, line: bool) -> None:
    text = write_yaml(value, in_one_line=line)
    assert not line or "\n" not in text
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
