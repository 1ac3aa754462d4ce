"""What the golden record calls a difference."""

from benchmarks.interruptions.golden import EVERY, differences


def parts(digest: str) -> dict[str, str]:
    return dict.fromkeys(EVERY, digest)


def test_equal_runs_have_no_difference() -> None:
    assert differences({"plain": parts("a")}, {"plain": parts("a")}) == []


def test_each_part_that_differs_from_the_record_is_named() -> None:
    found = differences({"plain": parts("a") | {"datums": "b"}}, {"plain": parts("a")})
    assert found == ["plain: datums differs from its record"]


def test_a_run_that_the_record_lacks_differs_in_every_part() -> None:
    assert len(differences({"plain": parts("a")}, {})) == len(EVERY)


def test_batches_of_another_number_equal_the_plain_run_of_the_same_commit() -> None:
    both = {"plain": parts("a"), "batches": parts("b")}
    assert differences(both, both) == [f"batches: {part} differs from plain" for part in EVERY]
