"""Tables for a terminal or in Markdown: scores of evaluations, a comparison, and costs."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.adapters.errors import counted
from ratchet.adapters.process.terminal import on_one_line
from ratchet.adapters.rewards import MEASURE
from ratchet.tasks.recording.scores import Score, read_evaluation
from ratchet.tasks.spending.ledger import TOKEN_KINDS, UNANSWERED, SpentTokens, TokenLedger
from ratchet.tasks.storage.run_folder import folder_of

if TYPE_CHECKING:
    from ratchet.tasks.comparison.comparisons import Comparison

COST_COLUMNS = ("purpose", "role", "use", "requests", *TOKEN_KINDS, "USD")
SPENT = {"tokens": "tokens", "cost": "USD"}
"""Usage of a role that no policy answers → its name in the table."""

GAP = "  "
"""What stands between the columns of a table for a terminal."""
NARROWEST_SHORTENED = 6
"""Letters of the narrowest column that is still shortened."""
SHOWN_LETTERS = 160
"""Letters of a question or an answer that are shown."""
Call = Mapping[str, str | None]
"""What was asked and said in a call."""
ExamplePairs = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Examples as a target and as the one that it is compared with played them."""
NO_CALL: Call = {"asked": "", "said": ""}
TARGET_COLUMNS = (
    *("target", "reward", "difference", "95 % interval", "p", "won", "lost", "tied"),
    *("failed", "tokens", "USD"),
)


def scores_table(scores: Mapping[str, Score]) -> str:
    """Return an evaluation as a table for a terminal, as `score_rows` lists it."""
    return aligned(*score_rows(scores))


def list_evaluations(
    files: Iterable[Path], *, usage: bool = True
) -> tuple[list[str], list[list[object]]]:
    """List the scores of evaluations as `score_rows` does, each with its checkpoint's step first.

    Evaluations by other settings than the run's say so. What is equal is listed once.
    """
    scores = dict[str, Score]()
    for path in files:
        step, settings = path.stem[:5].lstrip("0") or "0", path.stem[6:]
        for how, score in read_evaluation(path).items():
            if scores.get(f"{step} {how}") != score:
                scores[f"{step} {how}{settings and f' by settings {settings}'}"] = score
    names, rows = score_rows(scores, usage=usage)
    return ["step", *names], [[*str(played).split(" ", 1), *row] for played, *row in rows]


def score_rows(
    scores: Mapping[str, Score], *, usage: bool = True
) -> tuple[list[str], list[list[object]]]:
    """List scores, each with its categories; return the names of the columns and the rows.

    The reward is over finished rollouts, with its 95 % interval. The agent's measures follow. With
    `usage` each role that no policy answers has a column for its tokens, and one for a known cost.
    """
    names = ["played", "category", "examples", "failed", "reward", "95 % interval"]
    spent = [
        (role, what)
        for role in sorted({role for score in scores.values() for role in score.spent})
        for what in SPENT
        if usage and any(_spent(score, role, what) for score in scores.values())
    ]
    measures = sorted({name for score in scores.values() for name in score.measures})
    rows: list[list[object]] = []
    for how, whole in scores.items():
        for category, score in {"all": whole, **whole.categories}.items():
            known = score.finished
            interval = " to ".join(f"{bound:.3g}" for bound in known.interval or ()) or None
            row = [how, category, known.examples, score.failed, known.mean, interval]
            row += map(score.measures.get, measures)
            rows.append([*row, *(_spent(score, *column) for column in spent)])
    names += [name.removeprefix(MEASURE) for name in measures]
    return [*names, *(f"{role} {SPENT[what]}" for role, what in spent)], rows


def describe_comparison(
    comparison: "Comparison", apart: Mapping[str, ExamplePairs], width: int
) -> str:
    """Return a comparison as a table, with the examples by which each target is most `apart`."""
    rows: list[list[object]] = []
    measures = sorted({name for one in comparison.targets for name in one.measures})
    for one in comparison.targets:
        compared: list[object] = [None] * 6
        if (by := one.difference) is not None:
            interval = " to ".join(f"{end:+.3f}" for end in by.interval or ()) or None
            mean = None if by.mean is None else f"{by.mean:+.3f}"
            compared = [mean, interval, by.p_value, by.won, by.lost, by.tied]
        own = one.failed or None, one.tokens, one.cost, *map(one.measures.get, measures)
        rows.append([one.target, one.reward, *compared, *own])
    names = [*TARGET_COLUMNS, *(name.removeprefix(MEASURE) for name in measures)]
    parts = [fitted(names, rows, width, ["target"])]
    parts += [_differing(name, comparison.against, pairs) for name, pairs in apart.items() if pairs]
    folder = folder_of(comparison.folder).path
    played = counted(comparison.examples, "example")
    said = f"{played}, each compared with {comparison.against}: {folder}"
    return "\n\n".join([*parts, said])


def _differing(target: str, against: str, pairs: ExamplePairs) -> str:
    """Return the examples on which a target and the other one differ most, as text."""
    blocks = [f"{target} and {against} differ most in"]
    for own, other in pairs:
        number, *calls = calls_apart(own["calls"], other["calls"], SHOWN_LETTERS)
        asked, *others = dict.fromkeys(call["asked"] for call in calls)
        where = f", call {number + 1}" if number else ""
        lines = [f"example {own['example_id']}{where}: {'' if others else _shown(asked)}"]
        for one, call in zip((own, other), calls, strict=True):
            lines += [f"    {one['target']} was asked: {_shown(call['asked'])}"] if others else []
            lines.append(f"    {one['reward']:.3g}  {one['target']}: {_shown(call['said'])}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _shown(text: str | None) -> str:
    """Return a text on one line and without control characters."""
    return on_one_line(" ".join((text or "-").split())) or "-"


def calls_apart(own: Sequence[Call], other: Sequence[Call], most: int) -> tuple[int, Call, Call]:
    """Find the first call that differs between two rollouts, or else the last; return it of both.

    A rollout that has ended by then has an empty one. Texts of more than `most` letters are
    shortened: to where they differ, or else to their beginning and end.
    """
    pairs = [*zip_longest(own, other, fillvalue=NO_CALL)] or [(NO_CALL, NO_CALL)]
    number = next((at for at, (one, two) in enumerate(pairs) if one != two), len(pairs) - 1)
    shown = [dict(call) for call in pairs[number]]
    for key in NO_CALL:
        texts = [call[key] or "" for call in shown]
        alike = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))])
        start = None if texts[0] == texts[1] else max(0, alike - most // 4)
        for call, text in zip(shown, texts, strict=True):
            left = "…" if start else "", "…" if len(text) > (start or 0) + most else ""
            call[key] = shorten(text, most) if start is None else text[start:][:most].join(left)
    return number, shown[0], shown[1]


def aligned(names: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """Align cells as a table for a terminal; None is a dash."""
    rows = [[*map(_cell, row)] for row in (names, *cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows)


def fitted(
    names: Sequence[str], cells: Iterable[Sequence[object]], width: int, long: Collection[str]
) -> str:
    """Align cells as a table of `width` letters: cells of the `long` columns are shortened.

    A column without a value in any row is left out.
    """
    rows = [[None if value is None else _cell(value) for value in row] for row in cells]
    columns = [
        (name, [_cell(name), *column])
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
        if any(value is not None for value in column)
    ]
    widths = [max(len(value or "-") for value in column) for _, column in columns]
    room = width - len(GAP) * (len(columns) - 1)
    shrinking = [index for index, (name, _) in enumerate(columns) if name in long]
    while sum(widths) > room and max(widths[index] for index in shrinking) > NARROWEST_SHORTENED:
        widths[max(shrinking, key=widths.__getitem__)] -= 1
    shortened = [
        [value and shorten(value, most) for value in column]
        for (_, column), most in zip(columns, widths, strict=True)
    ]
    head, *body = zip(*shortened, strict=True)
    return aligned(head, body)


def shorten(text: str, most: int) -> str:
    """Shorten a text to at most `most` letters: its beginning and its end."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def markdown_table(names: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """Return cells as a table in Markdown; None is a dash."""
    head, *rows = ([_cell(value).replace("|", "\\|") for value in row] for row in (names, *cells))
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def describe_costs(ledger: TokenLedger) -> str:
    """Return a run's ledger as a table for a terminal, and what is left to say below it."""
    total = ledger.tokens(answered=True)
    rows = [*rows_by_purpose(ledger)]
    rows.append(["all answered", None, None, None, *total.values(), _total(ledger)])
    return "\n".join([ledger.run, aligned(COST_COLUMNS, rows), *_notes(ledger)])


def rows_by_purpose(ledger: TokenLedger) -> Iterator[list[object]]:
    """Yield a row by COST_COLUMNS for each purpose, role and use, of all steps."""
    merged: dict[tuple[str, str, str, bool], list[SpentTokens]] = {}
    for row in ledger.rows:
        merged.setdefault((row.purpose, row.role, row.use, row.ours), []).append(row)
    for (purpose, role, use, _), rows in merged.items():
        tokens = Counter[str](dict.fromkeys(TOKEN_KINDS, 0))
        for row in rows:
            tokens.update(row.tokens)
        known = [ledger.cost_of(row) for row in rows]
        cost = None if None in known else sum(filter(None, known))
        requests = sum(row.requests for row in rows)
        yield [purpose, role, use, requests, *(tokens[kind] for kind in TOKEN_KINDS), cost]


def _total(ledger: TokenLedger) -> float | None:
    known = [ledger.cost_of(row) for row in ledger.rows if row.use != UNANSWERED]
    return None if None in known else sum(filter(None, known))


def _notes(ledger: TokenLedger) -> Iterator[str]:
    """Yield sentences about what the table leaves open."""
    if any(ledger.tokens(answered=False).values()):
        yield (
            "What was not answered may have been computed: its tokens are the most that it can be, "
            "and count in no sum."
        )
    if ledger.prices is None:
        yield "The run's model has no price."
    elif missing := ledger.prices.missing(ledger.tokens(answered=True)):
        yield f"The file of prices has none of {' and '.join(missing)} tokens of the run's model."
    else:
        yield f"Prices are those of {ledger.prices.date or 'the named file'}, without storage."


def _spent(score: Score, role: str, what: str) -> float | None:
    return getattr(score.spent.get(role), what, None)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else on_one_line(str(value))
