"""SkyRL's own server of the Tinker API, in the environment of skyrl, on loopback.

SkyRL starts its engine by `uv run` and wants to be started so itself; here this Python starts both.
"""
# SkyRL is not installed where the types are checked.
# pyright: reportMissingImports=false

import argparse
import sys
from typing import Any

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, add_model, config_to_argv


def _engine_command(_: list[str], config: Any) -> list[str]:
    return [sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config)]


def main() -> None:
    api._build_uv_run_cmd_engine = _engine_command
    options = argparse.ArgumentParser(description=__doc__)
    add_model(options, EngineConfig)
    options.add_argument("--port", type=int, required=True)
    arguments = vars(options.parse_args())
    known = {name: value for name, value in arguments.items() if name in EngineConfig.model_fields}
    api.app.state.engine_config = EngineConfig.model_validate(known)
    uvicorn.run(api.app, host="127.0.0.1", port=arguments["port"])


if __name__ == "__main__":
    main()
