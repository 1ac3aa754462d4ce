import json

from adapters.dialects.sse import write_data


def test_a_piece_is_one_line_whatever_a_client_takes_for_the_end_of_a_line() -> None:
    said = {"content": "one\u2028two\x85three\r\nfour é"}
    (line, _) = write_data(said).split("\n", 1)
    assert write_data(said).splitlines() == [line, ""]
    assert json.loads(line.removeprefix("data: ")) == said
