"""Writes the tutorial as a notebook and as a script, docs/tutorial.ipynb and .py.

Run:  python docs/notebook.py
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

PAGE = Path(__file__).parent / "tutorial.md"
# Code of a step, and what it prints.
STEP = re.compile(
    r"^``` { \.python }\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.M | re.S,
)
HEADING = re.compile(r"^## (.+)$", re.M)

SCRIPT = '''\
"""The code of the tutorial, tutorial.md. Dask's workers import this script."""

{standard}

{imports}


{definitions}


if __name__ == "__main__":
{statements}
'''


def notebook(page: str) -> str:
    """Return a page as a notebook: its Python blocks are cells of code."""
    page = page.replace("``` { .python .elsewhere }", "```python")
    cells = []

    def add(kind: str, source: str, **content: object) -> None:
        if source := source.strip():
            lines = source.splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
            cells.append(cell | {"source": lines} | content)

    end = 0
    for step in STEP.finditer(page):
        add("markdown", page[end : step.start()])
        output = {"name": "stdout", "output_type": "stream"}
        output["text"] = (step["output"] or "").splitlines(keepends=True)
        outputs = [output] if output["text"] else []
        add("code", step["code"], execution_count=None, outputs=outputs)
        end = step.end()
    add("markdown", page[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}}
    content |= {"nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def top_level(code: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements of a block, each with the comments before it."""
    lines = code.splitlines(keepends=True)
    end = 0
    for statement in ast.parse(code).body:
        yield statement, "".join(lines[end : statement.end_lineno])
        end = statement.end_lineno


def script(page: str) -> str:
    """Return the code of a page as a script.

    Imports, functions and classes come first; everything else is under the guard that
    Dask's workers need, with the page's headings as comments.
    """
    standard, imports, definitions, statements = [], [], [], []
    for step in STEP.finditer(page):
        *_, heading = HEADING.finditer(page, 0, step.start())
        comment = f"\n# {heading[1]}\n"
        if comment not in statements:
            statements.append(comment)
        for statement, text in top_level(step["code"]):
            if statements[-1] == comment:
                text = text.lstrip("\n")
            match statement:
                case ast.Import() | ast.ImportFrom():
                    package = re.match(r"\s*\w+ (\w+)", text)[1]
                    is_standard = package in sys.stdlib_module_names
                    (standard if is_standard else imports).append(text.strip())
                case ast.FunctionDef() | ast.ClassDef():
                    definitions.append(text.strip())
                case _:
                    statements.append(text)
    guarded = re.sub(r"\n{3,}", "\n\n", "".join(statements)).strip("\n")
    return SCRIPT.format(
        standard="\n".join(standard),
        imports="\n".join(imports),
        definitions="\n\n\n".join(definitions),
        statements=indent(guarded, " " * 4),
    )


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.with_suffix(".ipynb").write_text(notebook(text))
    PAGE.with_suffix(".py").write_text(script(text))
