"""Execute the notebooks whose outputs are committed, and write the outputs into them: `make
notebooks`.

Their own sources' digest stands in the metadata, so that a test sees a source that changed without
its outputs. A cell with the tag `varies` prints what other machines print otherwise (seconds,
trained weights): its outputs are shown and not compared.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
STORED = tuple(
    ROOT / "notebooks" / f"{name}.ipynb" for name in ("04_sampling", "05_own_reward", "06_planning")
)
_MACHINE = re.compile(r"/(?:home|root|tmp|work|Users)/|site-packages")


def digest(notebook: Any) -> str:
    """Return a digest of the cells' sources."""
    text = "\0".join(f"{cell.cell_type}\n{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def executed(path: Path) -> Any:
    """Return the notebook, run from top to bottom by this Python in an empty directory. An error in
    a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    places = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=600,
            record_timing=False,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        cell.pop("execution_count", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output.execution_count = None
    notebook.metadata["digenrl"] = {"sources": digest(notebook)}
    return notebook


def printed(notebook: Any, varying: bool = False) -> list[str]:
    """What each code cell printed; of those with the tag `varies` only if asked for."""
    return [
        "".join(
            output.get("text", "") or output.get("data", {}).get("text/plain", "")
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code" and (varying or "varies" not in cell.metadata.get("tags", ()))
    ]


def machine_paths(notebook: Any) -> list[str]:
    """Lines of the outputs that name a place on the machine that made them."""
    return [
        line
        for text in printed(notebook, varying=True)
        for line in text.splitlines()
        if _MACHINE.search(line)
    ]


def main() -> int:
    """Exit code 1 where an output names a place of this machine; that notebook is left as it
    was."""
    code = 0
    for path in STORED:
        notebook = executed(path)
        if found := machine_paths(notebook):
            print(
                f"{path.name} prints places of this machine, so it is not written: {found[0]}",
                file=sys.stderr,
            )
            code = 1
        else:
            nbformat.write(notebook, path)
            print(path.relative_to(ROOT))
    return code


if __name__ == "__main__":
    sys.exit(main())
