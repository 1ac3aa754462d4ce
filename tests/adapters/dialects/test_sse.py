import json

from ratchet.adapters.dialects.fields import write_data


def test_a_piece_is_one_line_for_any_kind_of_line_break() -> None:
    said = {"content": "one\u2028two\x85three\r\nfour é"}
    (line, _) = write_data(said).split("\n", 1)
    assert write_data(said).splitlines() == [line, ""]
    assert json.loads(line.removeprefix("data: ")) == said
