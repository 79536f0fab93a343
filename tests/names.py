"""Names that say nothing are refused: ``python -m tests.names``, a part of `make lint`.

Refused in `daskdl` are values and functions with a name in `BANNED`, a
tuple that is built to be unpacked into a later call, a class whose name another module
defines, and a private function whose name two other modules define.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "daskdl"

BANNED = {
    *("own", "one", "found", "made", "said", "given", "more", "rest", "other"),
    *("whole", "first", "then"),
}

Functions = ast.FunctionDef | ast.AsyncFunctionDef


def named(node: ast.AST) -> str | None:
    """The name that a node gives to a value; None if it gives none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name.removeprefix("_")
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return name.removeprefix("_")
        case ast.ExceptHandler(name=name) | ast.alias(asname=name):
            return name
        case ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
    return None


def bundles(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Variables that are tuples, and unpacked into the arguments of a call."""
    unpacked = {
        argument.value.id
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name)
    }
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name() as target], value=ast.Tuple()):
                if target.id in unpacked:
                    yield target.lineno, f"pass the items of {target.id!r} as arguments"


def findings(tree: ast.Module) -> set[tuple[int, str]]:
    """Lines of a module with what is wrong there."""
    wrong = set()
    for node in ast.walk(tree):
        name = named(node)
        if name in BANNED:
            wrong.add((node.lineno, f"{name!r} does not say what the value is for"))
        if isinstance(node, Functions):
            wrong |= set(bundles(node))
    return wrong


def shared_names(trees: dict[str, ast.Module]) -> Iterator[tuple[str, int, str]]:
    """Definitions whose names other modules have, too: file, line, what is wrong."""
    places = defaultdict(list)
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name, 1].append((file, node.lineno))
            elif isinstance(node, Functions) and node.name.strip("_") != node.name:
                places[node.name, 2].append((file, node.lineno))
    for (name, allowed), where in places.items():
        for file, line in where if len(where) > allowed else ():
            files = ", ".join(sorted({f for f, _ in where} - {file}))
            yield file, line, f"{name} is also defined in {files}"


def problems(package: Path) -> list[str]:
    """All findings in a package."""
    paths = {str(p.relative_to(package)): p for p in sorted(package.rglob("*.py"))}
    trees = {file: ast.parse(path.read_text()) for file, path in paths.items()}
    lines = [(f, *finding) for f, tree in trees.items() for finding in findings(tree)]
    lines += shared_names(trees)
    return [f"{file}:{line}: {text}" for file, line, text in sorted(lines)]


if __name__ == "__main__":
    lines = problems(PACKAGE)
    print("\n".join(lines))
    sys.exit(bool(lines))
