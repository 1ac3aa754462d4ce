"""What an address asks a page of the board for; each value is checked before it is used."""

from collections import defaultdict
from typing import Literal, Self
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field

PAGE = 50
"""Rows of a page."""


class FromQuery(BaseModel):
    """Values of a page's query, whose names and bounds are the fields'; others are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page: int = Field(default=1, ge=1, le=10**6)
    live: Literal["on", "off"] = "on"

    @classmethod
    def read(cls, pairs: list[tuple[str, str]]) -> Self:
        """Read the pairs of a query: of a name the last or, of a list, all that are not empty."""
        given: dict[str, list[str]] = defaultdict(list)
        for name, text in pairs:
            if text:
                given[name].append(text)
        lists = {name for name, field in cls.model_fields.items() if field.annotation == list[str]}
        values = {name: texts if name in lists else texts[-1] for name, texts in given.items()}
        return cls.model_validate(values)

    def query(self, **changes: object) -> str:
        """Return the query of the same page with some values changed, those of no default."""
        values = self.model_copy(update=changes).model_dump(exclude_defaults=True)
        return f"?{urlencode(values, doseq=True)}"


def skipped(asked: FromQuery) -> int:
    """Return how many rows come before the page that is asked for."""
    return PAGE * (asked.page - 1)
