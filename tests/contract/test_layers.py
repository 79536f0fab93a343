"""Who may import whom, and what from outside."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

import daskdl

ROOT = Path(daskdl.__file__).parent
PATHS = sorted(ROOT.rglob("*.py"))

# Imports point to an earlier line only. A folder is one name here; inside of one,
# the files must not import in a circle.
LAYERS = [
    {"errors"},
    {"config", "util", "codec", "serialization", "objective"},
    {"cluster"},
    {"thresholds", "residuals", "history"},
    {"callbacks"},
    {"compression"},
    {"channel", "data"},
    {"keras", "outputs", "metrics", "saving", "scores"},
    {"lazy_outputs"},
    {"predictions"},
    {"evaluation", "inference", "per_example"},
    {"training"},
    {"serving", "fitted"},
    {"trainer"},
    {"planning"},
    {"public"},
    {"__init__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

OUTSIDE = {
    "config": {"dask"},
    "util": set(),
    "serialization": {"cloudpickle", "numpy", "torch", "typing_extensions"},
    "errors": set(),
    "compression": {"llvmlite", "numba", "numpy", "torch", "typing_extensions"},
    "codec": {"lz4", "numba", "numpy", "typing_extensions"},
    "objective": {"torch"},
    "thresholds": {"torch", "typing_extensions"},
    "residuals": {"typing_extensions"},
    "callbacks": {"dask", "pandas", "typing_extensions"},
    "history": {"numpy", "pandas", "typing_extensions"},
    "channel": {"distributed", "numpy", "typing_extensions"},
    "data": {
        "PIL",
        "dask",
        "distributed",
        "fsspec",
        "numpy",
        "pandas",
        "pyarrow",
        "safetensors",
        "torch",
        "typing_extensions",
    },
    "cluster": {"dask", "distributed", "torch"},
    "saving": {"numpy", "safetensors", "torch"},
    "fitted": {"numpy", "torch"},
    "keras": {"h5py", "keras", "torch", "typing_extensions"},
    "metrics": {
        "matplotlib",
        "numpy",
        "pandas",
        "torch",
        "torchmetrics",
        "typing_extensions",
    },
    "outputs": {
        "dask",
        "distributed",
        "numpy",
        "pandas",
        "torch",
        "typing_extensions",
    },
    "lazy_outputs": {"dask", "distributed", "numpy"},
    "predictions": {
        "dask",
        "distributed",
        "numpy",
        "pandas",
        "safetensors",
        "torch",
        "typing_extensions",
    },
    "scores": {"torch"},
    "evaluation": {"distributed", "torch"},
    "inference": {"distributed", "numpy", "torch"},
    "per_example": {
        "dask",
        "distributed",
        "numpy",
        "pandas",
        "torch",
        "typing_extensions",
    },
    "training": {
        "cloudpickle",
        "distributed",
        "numpy",
        "torch",
        "tqdm",
        "typing_extensions",
    },
    "serving": {"cloudpickle", "distributed", "numpy", "torch", "typing_extensions"},
    "trainer": {"distributed", "torch"},
    "planning": {
        "dask",
        "distributed",
        "numpy",
        "pandas",
        "torch",
        "typing_extensions",
    },
    "__init__": set(),
    "public": set(),
}

# The edges: everything else runs, and is tested, without a cluster.
DISTRIBUTED = {
    "channel.protocol",  # Dask's wrappers, so that it does not touch the bytes
    "channel.scheduler",
    "channel.sender",  # requests of a replica
    "channel.worker",
    "cluster",
    "data.futures",
    "data.loading",
    "data.looking",
    "data.passes",
    "data.supplies",
    "evaluation",
    "inference.prediction",
    "lazy_outputs",
    "outputs.first_rows",
    "outputs.held",
    "per_example.keys",  # of what is not in memory
    "per_example.rehearsal",
    "per_example.scores",
    "planning.idle_worker",
    "planning.requests",
    "predictions.writing",
    "serving.predictor",
    "serving.remote",
    "serving.worker",
    "trainer",
    "training.dask_backend",
    "training.fit",
}


def name_of(path: Path) -> str:
    """The dotted name below the package, of a folder that of its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Everything a file imports, at any depth of the code, as full dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own(names: set[str]) -> set[str]:
    """Those of this package, below it."""
    return {n.removeprefix("daskdl.") for n in names if n.startswith("daskdl.")}


FILES = {name_of(path): imported(path) for path in PATHS}


def files_of(name: str) -> list[str]:
    """The file an imported name is, or is in: `codec.gaps.RICE` is in `codec.gaps`."""
    parts = name.split(".")
    longer = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return [n for n in longer if n in FILES][:1]


def test_every_part_has_a_layer_and_a_list_of_what_it_may_import():
    parts = {name.split(".")[0] for name in FILES}

    assert parts == set(LEVEL) == set(OUTSIDE)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    part = name.split(".")[0]
    others = {n.split(".")[0] for n in own(FILES[name])} - {part}

    upward = {other for other in others if LEVEL[other] >= LEVEL[part]}

    assert not upward, f"{name} must not import {upward}"


def test_files_do_not_import_in_a_circle():
    graph = {
        name: {file for n in own(names) for file in files_of(n)} - {name}
        for name, names in FILES.items()
    }

    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises on one

    assert set(order) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_each_part_imports_from_outside_only_what_it_may(name):
    outside = {n.split(".")[0] for n in FILES[name]} - set(sys.stdlib_module_names)

    more = outside - {"daskdl"} - OUTSIDE[name.split(".")[0]]

    assert not more, f"{name} must not import {more}"


def test_nothing_is_allowed_that_nobody_needs():
    used = {part: set() for part in OUTSIDE}
    for name, names in FILES.items():
        used[name.split(".")[0]] |= {n.split(".")[0] for n in names}

    assert {
        part: OUTSIDE[part] - used[part]
        for part in OUTSIDE
        if OUTSIDE[part] - used[part]
    } == {}


def test_distributed_is_imported_at_the_edges_only():
    users = {
        n
        for n, names in FILES.items()
        if any(i.split(".")[0] == "distributed" for i in names)
    }

    assert users == DISTRIBUTED
