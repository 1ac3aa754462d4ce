"""Notebooks without Jupyter: their cells run in one namespace, and their outputs are kept.

`python -m tests.support.notebook FILE` runs a notebook and keeps what came in it.
"""

import ast
import base64
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def code_cells(notebook: Cell) -> list[Cell]:
    """Return the cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_notebook(notebook: Cell) -> None:
    """Run the cells of code in order, each of whose outputs take the place of the earlier ones."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate(code_cells(notebook), 1):
        cell["execution_count"] = count
        cell["outputs"] = _run("".join(cell["source"]), names, count)


def text_of(cell: Cell) -> str:
    """Return the text that a cell has printed or ended with."""
    parts = [
        output.get("text", output.get("data", {}).get("text/plain", ""))
        for output in cell["outputs"]
    ]
    return "\n".join("".join(part) for part in parts)


def _run(source: str, names: dict[str, Any], count: int) -> list[Cell]:
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        if source.startswith("!"):
            printed.write(_command(source[1:]))
        else:
            value = _execute(source, names)
    outputs: list[Cell] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None:
        data = {"text/plain": f"{value!r}" if not hasattr(value, "fetchall") else f"{value}"}
        result = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
        outputs.append({**result, "data": data})
    return outputs + _figures()


def _execute(source: str, names: dict[str, Any]) -> object:
    """Run a cell; return the value of its last expression, which a semicolon hides."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return None
    tree.body.pop()
    exec(compile(tree, "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return None if source.rstrip().endswith(";") else value


def _command(command: str) -> str:
    """Run a command line by this environment's programs; return what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{command!r} failed: {ran.stderr}")
    return ran.stdout


def _figures() -> list[Cell]:
    """Return the figures that a cell has drawn, as Jupyter shows them."""
    from matplotlib import pyplot as plt

    outputs = []
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(drawn, format="png", dpi=72, bbox_inches="tight")
        image = base64.b64encode(drawn.getvalue()).decode()
        shown = {"image/png": image, "text/plain": "<Figure>"}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": shown})
    plt.close("all")
    return outputs


def main() -> None:
    """Run the notebook that the command names, and keep its outputs."""
    file = Path(sys.argv[1])
    notebook = json.loads(file.read_text(encoding="utf-8"))
    run_notebook(notebook)
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
