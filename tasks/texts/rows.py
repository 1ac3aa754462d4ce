"""The rows of a source of texts or pairs, as they were before their file padded them."""

from collections.abc import Iterator

from tasks.examples.reading import DatasetError, Example, Source, is_padded
from tasks.texts.conversations import drop_nulls, speaks


def read_rows(source: Source) -> Iterator[Example]:
    """Yield the rows of a source; DatasetError if they do not all name roles as the first does.

    Parquet has no absent keys, so that a null in an object is taken for one. In JSON, of JSON lines
    or of a text in a column, a null is a value.
    """
    padded, known = is_padded(source.dataset), None
    for row in source.examples():
        example = row["example"]
        if padded:
            example = {name: drop_nulls(value) for name, value in example.items()}
        spoken = speaks(example)
        if known is not None and spoken not in (None, known):
            raise DatasetError(
                f"row {row['example_id']} of {source.dataset} has the roles of {spoken}, and "
                f"earlier rows those of {known}; give all rows the same roles"
            )
        known = known or spoken
        yield {**row, "example": example}
