"""The tables of benchmarks."""

from benchmarks.measuring import format_table


def test_columns_of_numbers_are_aligned_to_the_right_and_text_to_the_left() -> None:
    rows = [
        ("the engine", "1,225", "1,224-1,226", "0.7 to 0.9", "-0.4 %", "1", ""),
        ("nothing", "nan", "", "5 s", "2.00 (1.90-2.10)", "1 and a forward", ""),
    ]
    table = format_table("Speed", ("", "a", "b", "c", "d", "passes", "e"), rows)
    assert table.splitlines()[:4] == [
        "### Speed",
        "",
        "|  | a | b | c | d | passes | e |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
