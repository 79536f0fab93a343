"""Writes the tutorial as a notebook, docs/tutorial.ipynb.

Run:  python docs/notebook.py
"""

import json
import re
from pathlib import Path

PAGE = Path(__file__).parent / "tutorial.md"
BLOCK = re.compile(r"^``` { \.python }\n(.*?)^```\n", re.M | re.S)


def notebook(page: str) -> str:
    """Return a page as a notebook: its Python blocks are cells of code."""
    page = page.replace("``` { .python .elsewhere }", "```python")
    parts = BLOCK.split(page)
    cells = []
    for number, text in enumerate(map(str.strip, parts)):
        if not text:
            continue
        cell = {"id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if number % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            cell["cell_type"] = "markdown"
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}}
    whole |= {"nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))
