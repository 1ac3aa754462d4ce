"""The command `python -m pretraining`, which builds the engine's tiny base model anew."""

from argparse import ArgumentParser
from pathlib import Path

from ratchet.adapters.process.terminal import show
from ratchet.flows.server.prefect_startup import quiet_prefect


def main() -> None:
    """Build the model, in about an hour on two cores; the same command goes on after a stop."""
    parser = ArgumentParser(prog="python -m pretraining", description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrain"), help="of the model")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and every document")
    asked = parser.parse_args()
    quiet_prefect(verbose=True)
    from pretraining.flow import pretrain

    built = pretrain(folder=asked.folder, seed=asked.seed)
    show(f"{built} is ready: `ratchet engine --base-model {built.resolve()}` serves it")


if __name__ == "__main__":
    main()
