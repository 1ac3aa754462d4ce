"""The commands that read the files of runs, and train nothing."""

import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Annotated, Literal

import typer

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.terminal import show, terminal_width, write_data, write_json
from ratchet.flows.cli.commands import AsJson, Port, Run
from ratchet.tasks.reports.board.runs import list_runs, runs_table
from ratchet.tasks.reports.tables import describe_costs
from ratchet.tasks.spending.ledger import read_ledger
from ratchet.tasks.storage.files import is_written, write_bytes
from ratchet.tasks.storage.manifest import read_manifest, readable_runs
from ratchet.tasks.storage.plan_record import child_runs
from ratchet.tasks.storage.run_folder import RunFolder, folder_of, runs_root

Runs = Annotated[
    list[str] | None, typer.Option(help="A run to read; repeat it for several, omit it for all.")
]


def runs(
    as_json: AsJson = False,
    size: Annotated[bool, typer.Option("--size", help="Show the bytes of each run here.")] = False,
) -> None:
    if as_json:
        records, root = [row["record"] for row in list_runs()], runs_root()
        sizes = [RunFolder(root / of["run"]).sizes() if size else {} for of in records]
        own = [{"bytes": sum(one.values())} if size else {} for one in sizes]
        write_json([of | more for of, more in zip(records, own, strict=True)])
        return
    table, _, below = runs_table(terminal_width(), sized=size).partition("\n\n")
    show(table)
    if below:
        show(f"\n{below}")


def watch(run: Run) -> None:
    from ratchet.flows.cli.progress_bar import watch_folder

    folder = folder_of(run)
    if begun := [one.name for one in child_runs(folder)]:
        raise UserError(
            f"{run} is made of runs, which are watched by their names; begun are {', '.join(begun)}"
        )
    read_manifest(folder)  # refuses a run that is not there, and another format
    watch_folder(folder)


def report(
    runs: Annotated[list[str], typer.Argument(help="Names of runs; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page's file; by default report.html in the folder of the run or the runs."
        ),
    ] = None,
) -> None:
    from ratchet.tasks.reports.page import write_report

    folders = [folder_of(name) for name in runs]
    out = out or (folders[0].report if len(folders) == 1 else runs_root() / "report.html")
    show(str(write_report(folders, out)))


def board(port: Port = 0) -> None:
    from ratchet.flows.server.board import serve_board

    with serve_board(port) as address:
        show(address)
        Event().wait()  # until a signal


def sql(
    statement: Annotated[
        str, typer.Argument(help="One statement, in DuckDB's SQL, over the views of docs/sql.md.")
    ],
    run: Runs = None,
    format: Annotated[
        Literal["table", "csv", "json", "parquet"], typer.Option(help="Format of the rows.")
    ] = "table",
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default the terminal.")
    ] = None,
) -> None:
    from ratchet.tasks.recording.queries import answer_query

    runs = _named(run) or readable_runs()
    if out is None and format == "parquet" and sys.stdout.isatty():
        raise UserError("Parquet is no text for a terminal: name a file with --out")
    rows = answer_query(statement, runs, format)
    if out is not None:
        write_bytes(out, rows)
        return
    write_data(rows)


def find(
    text: Annotated[str, typer.Argument(help="Words of a question, an answer or an example.")] = "",
    run: Runs = None,
    error: Annotated[str, typer.Option(help="Words of the error of a rollout.")] = "",
    tool: Annotated[str, typer.Option(help="Name of a tool that was called.")] = "",
    reward: Annotated[
        str, typer.Option(help="A reward, or a range of rewards: 0.2..0.8, ..0 or 1.. .")
    ] = "",
    first: Annotated[int, typer.Option(min=1, help="Rollouts that are shown.")] = 5,
) -> None:
    from ratchet.tasks.recording.queries import Sought, describe_found, read_range

    sought = Sought(text, error, tool, *read_range(reward))
    if sought == Sought():
        raise UserError("nothing is sought: give a text, --error, --tool or --reward")
    found = describe_found(_named(run) or readable_runs(), sought, first)
    if not found:
        raise UserError(
            "no rollout matches; leave out a condition, or search other runs (`ratchet runs`)"
        )
    show(found)


def costs(run: Run, as_json: AsJson = False) -> None:
    ledgers = [read_ledger(part) for part in child_runs(folder_of(run)) or _named([run])]
    if as_json:
        write_json([one.record() for one in ledgers])
        return
    show("\n\n".join(map(describe_costs, ledgers)))


def _named(names: list[str] | None) -> list[RunFolder]:
    """Return the runs of these names; UserError if one is not there."""
    runs = [folder_of(name) for name in names or ()]
    for run in runs:
        read_manifest(run)  # refuses a run that is not there
    return runs


def verify(run: Run) -> None:
    folder = folder_of(run)
    if not is_written(folder.path):
        read_manifest(folder)  # refuses a run that is not there
    parts = child_runs(folder) or [folder]
    damage = [sentence for part in parts for sentence in _damage_of(part)]
    for sentence in damage:
        show(sentence)
    if damage:
        raise SystemExit(1)
    for part in parts:
        show(f"{part.path} is as it was written: {len(part.files())} files, and the engine's")


def _damage_of(run: RunFolder) -> list[str]:
    """List what is damaged or missing in a run and in its engine, a sentence each."""
    from ratchet.tasks.reports.verification import find_damage

    damage = [*find_damage(run.fetched(whole=True))]
    command = [sys.executable, "-P", "-m", "ratchet.engine", "--verify", "--state", str(run.engine)]
    engine = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    damage += [f"{path} is not as the engine wrote it" for path in engine.stdout.splitlines()]
    if engine.returncode not in (0, 1):
        damage.append(f"{run.engine} could not be verified: see above")
    return damage


def debug(
    run: Run,
    rollout: Annotated[str, typer.Argument(help="Its id, such as train-00003-0012-01.")],
    sample: Annotated[
        bool, typer.Option("--sample", help="Have the run's model answer what differs.")
    ] = False,
    pdb: Annotated[bool, typer.Option("--pdb", help="Open pdb where the agent fails.")] = False,
) -> None:
    from ratchet.flows.debug import debug_rollout

    rerun = debug_rollout(folder_of(run), rollout, sample=sample, stop=pdb)
    for label, said in rerun.lines().items():
        show(f"{label:8}{said}")
