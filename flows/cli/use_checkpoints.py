"""The commands that use what was trained: one serves it, one writes it for other programs."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ratchet.adapters.process.terminal import say, show
from ratchet.tasks.storage.files import check_absent

app = typer.Typer()

PushTo = Annotated[
    str | None,
    typer.Option("--push", help="hub:OWNER/NAME: push the folder to this model of the hub."),
]


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="RUN, RUN@STEP, RUN:POLICY@STEP, a promoted name, an export, or a base model."
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on loopback; 0 chooses a free one.")
    ] = 0,
) -> None:
    """Serve a checkpoint to any OpenAI client, until Ctrl-C or the end of stdin."""
    from ratchet.flows.checkpoints.serving import (
        find_weights,
        serve_model,
        serve_until,
        stdin_closed,
    )

    with serve_model(find_weights(model), port) as (endpoint, service):
        for variable, value in endpoint.variables().items():
            show(f"export {variable}={value}")
        serve_until(stdin_closed(), service)
    say(
        "ratchet: stdin has ended, and so has the server; `sleep infinity | ratchet serve …` keeps "
        "one in the background",
        sys.stderr,
    )


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="RUN, RUN@STEP, RUN:POLICY@STEP or a promoted name.")
    ],
    out: Annotated[Path, typer.Option(help="The new folder; nothing is written over.")],
    format_: Annotated[
        Literal["peft", "merged"],
        typer.Option("--format", help="An adapter of PEFT's, or the base with it merged in."),
    ] = "peft",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Type of merged weights; bfloat16 is half as large, and rounds."),
    ] = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest difference of log-probabilities to the service's; by default 1e-4 on "
            "the engine of this machine, else 0.1.",
        ),
    ] = None,
    push_to: PushTo = None,
) -> None:
    """Write a checkpoint as a folder that transformers, PEFT and model servers load, checked."""
    from ratchet.adapters.project.hub import check_push, push
    from ratchet.flows.checkpoints.serving import find_weights

    check_absent(out)
    model = None if push_to is None else check_push(push_to)
    weights = find_weights(checkpoint)
    from ratchet.flows.export import ExportForm
    from ratchet.flows.export import export as write

    exported = write(weights, out, ExportForm(format_, dtype, tolerance))
    say(f"{out} has {exported.name}, {exported.contents}")
    lines = {
        "checked": [str(exported.parity)],
        "note": exported.notes(),
        "serve": [f"ratchet serve {out}"],
    }
    for label, said in lines.items():
        for line in said:
            say(f"{label:8}{line}")
    if model is not None:
        say(f"pushed  {push(out, model, f'Add {exported.name}')}")
