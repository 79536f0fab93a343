"""What is public is documented, and importing it does nothing else."""

import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import dask.config
import pytest

import daskdl
import daskdl.data
import daskdl.keras
import daskdl.metrics
from daskdl.channel import protocol
from daskdl.config import FILE
from daskdl.history import COLUMNS, STEP_COLUMNS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC = {
    **{name: getattr(daskdl, name) for name in daskdl.__all__ if name[0] != "_"},
    **{f"data.{name}": getattr(daskdl.data, name) for name in daskdl.data.__all__},
    **{f"keras.{name}": getattr(daskdl.keras, name) for name in daskdl.keras.__all__},
    **{f"metrics.{n}": getattr(daskdl.metrics, n) for n in daskdl.metrics.__all__},
}
PACKAGES = pytest.mark.parametrize(
    "package",
    [daskdl, daskdl.data, daskdl.keras, daskdl.metrics],
    ids=lambda p: p.__name__,
)


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Rows of the first table after a heading, by their first cell in backticks."""
    text = (DOCS / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE)
    return {name: re.split(r"(?<!\\) ?\| ?", cells) for name, cells in rows}


@PACKAGES
def test_every_public_name_is_there(package):
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


@PACKAGES
def test_the_list_of_public_names_is_sorted_and_without_repeats(package):
    assert package.__all__ == sorted(set(package.__all__))


def test_nothing_is_imported_into_the_package_that_is_not_public():
    public = {
        name
        for name, value in vars(daskdl).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }

    assert public == set(daskdl.__all__) - {"__version__"}


def test_the_reference_documents_the_public_names_and_no_others():
    documented = re.findall(r"^::: daskdl\.(\S+)$", (DOCS / "api.md").read_text(), re.M)

    of_data = [f"data.{name}" for name in daskdl.data.__all__]
    of_keras = [f"keras.{name}" for name in daskdl.keras.__all__]
    of_metrics = [f"metrics.{name}" for name in daskdl.metrics.__all__]
    public = [*daskdl.__all__, *of_data, *of_keras, *of_metrics]
    assert sorted(documented) == sorted(public)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_of_its_own(name):
    value = PUBLIC[name]

    assert value.__doc__ is not None
    assert not value.__doc__.startswith(f"{value.__name__}("), (
        "that is what dataclass makes"
    )


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if isinstance(v, type)])
def test_what_users_call_of_a_public_class_is_documented(name):
    undocumented = [
        n
        for n, value in vars(PUBLIC[name]).items()
        if not n.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(PUBLIC[name], n))
    ]

    assert undocumented == []


def test_the_reference_lists_the_columns_of_the_history():
    rows = {
        name: cells[0].replace("\\|", "|")
        for name, cells in table("api.md", "History").items()
    }

    assert rows == COLUMNS


def test_the_reference_lists_the_columns_of_the_steps():
    rows = {name: cells[0] for name, cells in table("api.md", "Steps").items()}

    assert rows == STEP_COLUMNS


def written(strategy):
    """As short as one would write it."""
    own = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)}
    usual = type(strategy)()
    said = [f"{k}={v!r}" for k, v in own.items() if v != getattr(usual, k)]
    return f"{type(strategy).__name__}({', '.join(said)})"


def defaults_of(fields):
    return {
        field.name: (
            repr(field.default)
            if field.default is not dataclasses.MISSING
            else written(field.default_factory())
        )
        for field in fields
    }


@pytest.mark.parametrize(
    ("heading", "master"),
    [
        ("GradientSharing", daskdl.GradientSharing),
        ("ParameterAveraging", daskdl.ParameterAveraging),
    ],
)
def test_the_page_of_options_lists_those_of_a_master_with_their_defaults(
    heading, master
):
    defaults = defaults_of(dataclasses.fields(master))

    rows = table("options.md", heading)

    assert {name: cells[0].strip("`") for name, cells in rows.items()} == defaults


def test_the_page_of_options_lists_those_of_a_trainer_with_their_defaults():
    fields = [f for f in dataclasses.fields(daskdl.Trainer) if f.init and f.kw_only]

    rows = table("options.md", "Trainer")

    defaults = defaults_of(fields)
    assert {name: cells[0].strip("`") for name, cells in rows.items()} == defaults


def arguments_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: repr(p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_the_page_of_options_lists_those_of_a_fit_with_their_defaults():
    rows = table("options.md", "Fit")

    defaults = arguments_of(daskdl.Trainer.fit)
    assert {name: cells[0].strip("`") for name, cells in rows.items()} == defaults


@pytest.mark.parametrize(
    ("method", "heading"), [("evaluate", "Evaluate"), ("predict", "Predict")]
)
def test_the_page_of_options_says_which_of_them_others_have_too(method, heading):
    rows = table("options.md", "Fit")

    also = {name for name, cells in rows.items() if f"`{method}`" in cells[-1]}
    own = table("options.md", heading)
    defaults = {name: cells[0].strip("`") for name, cells in own.items()}
    arguments = arguments_of(getattr(daskdl.Trainer, method))
    assert also | set(own) == set(arguments)
    assert defaults.items() <= arguments.items()


def test_predicting_with_any_model_takes_what_a_trainer_takes():
    of_trainers = arguments_of(daskdl.Trainer.predict)

    assert arguments_of(daskdl.predict) == of_trainers | {"client": "None"}


def test_evaluating_any_model_takes_what_a_trainer_takes():
    more = {"loss": "None", "client": "None"}
    of_trainers = arguments_of(daskdl.Trainer.evaluate)

    assert arguments_of(daskdl.evaluate) == of_trainers | more


def test_the_page_of_options_lists_the_time_outs_with_their_defaults():
    (file,) = dask.config.collect_yaml([str(FILE)])
    defaults = {
        f"daskdl.timeouts.{name}": re.sub(r"(?<=\d)s$", " s", value)
        for name, value in file["daskdl"]["timeouts"].items()
    }

    rows = table("options.md", "Timeouts")

    assert {name: cells[0] for name, cells in rows.items()} == defaults


def test_the_page_of_options_lists_where_batch_files_go():
    (file,) = dask.config.collect_yaml([str(FILE)])
    names = {f"daskdl.export.{name}" for name in file["daskdl"]["export"]}

    rows = table("options.md", "Temporary batch files")

    assert set(file["daskdl"]["export"].values()) == {None}
    assert {name: cells[0].strip("`") for name, cells in rows.items()} == dict.fromkeys(
        names, "null"
    )


def test_the_page_on_tuning_lists_every_cause_of_waiting():
    assert set(table("tuning.md", "Waiting")) == set(protocol.WaitCause)


IMPORT = """
import ast, importlib, os, pathlib, sys, threading

root = pathlib.Path(sys.argv[1])
# What daskdl depends on may do as it likes; it does it before anybody looks.
for path in root.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            if name.split(".")[0] not in {"daskdl", "pandas", "keras"}:
                importlib.import_module(name)

import dask.config
from distributed.diagnostics import plugin

reads = []
kind = type(os.environ)

def watched(method):
    def read(self, *arguments):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith("<frozen "):  # of os
            frame = frame.f_back
        if pathlib.Path(frame.f_code.co_filename).is_relative_to(root):
            reads.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return method(self, *arguments)
    return read

kind.__getitem__ = watched(kind.__getitem__)
kind.__iter__ = watched(kind.__iter__)
defaults, *_ = dask.config.collect_yaml([str(root / "daskdl.yaml")])
expected = repr(dask.config.merge(dask.config.config, defaults))
threads = threading.active_count()

import daskdl

assert pathlib.Path(daskdl.__file__).parent == root, daskdl.__file__
assert reads == [], f"read the environment: {reads}"
assert threading.active_count() == threads, threading.enumerate()
assert repr(dask.config.config) == expected, "more than the defaults was added"
print("nothing but names")
"""


def test_import_starts_no_thread_reads_no_environment_and_adds_its_defaults():
    package = Path(daskdl.__file__).parent

    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(package)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=package.parent,
    )

    assert (done.stdout, done.stderr) == ("nothing but names\n", "")


FEW = {"torchmetrics", "matplotlib", "pandas", "pyarrow", "keras", "PIL", "dask.array"}
# What there is to wait for, and to hold in memory, before the first step.
NOT_FOR = {
    "daskdl.Trainer": FEW,  # a client
    "daskdl.training.dask_backend": FEW,  # a worker
    "daskdl.channel.scheduler": {"torch", *FEW},
    "daskdl": {"torch", "numba", "distributed", *FEW},
}


@pytest.mark.parametrize("name", NOT_FOR)
def test_what_few_need_is_not_imported_by_all(name):
    module = name.removesuffix(".Trainer")
    asked = f"import {module}, sys; {name}; "
    asked += f"print(sorted({NOT_FOR[name]!r} & sys.modules.keys()))"

    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=100
    )

    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_what_is_no_code_is_installed_too():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = Path(daskdl.__file__).parent
    files = [p.relative_to(package) for p in package.rglob("*") if p.is_file()]

    others = {
        str(p) for p in files if p.suffix != ".py" and p.parent.name != "__pycache__"
    }

    listed = project["tool"]["setuptools"]["package-data"]["daskdl"]
    assert others == set(listed)
