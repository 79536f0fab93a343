"""Every question that this folder answers, by its name.

python -m benchmarks --help
python -m benchmarks links --rates unlimited 100mbit
"""

import argparse
import importlib
import runpy
import sys

# Name, module, and whether it is a `Question`: prints a table, writes JSON and PNG.
QUESTIONS = {
    "scaling": "scaling",
    "time-to-accuracy": "time_to_accuracy",
    "links": "links",
    "peers": "side_by_side",
    "channel": "channel",
    "emulation": "emulation",
    "cost-model": "cost_model",
    "encode": "encode",
    "wire-size": "wire_size",
}

# These print a table, and take what their own --help says.
SCRIPTS = {
    "step": "what does daskdl add to a training step?",
    "first-step": "how long does `fit` take to make its first step?",
    "allocator": "what does the allocator setting of Dask's nanny cost a step?",
    "queues": "is a queue that counts so many MiB that large?",
    "process-memory": "how much memory does daskdl take beside a plain loop?",
    "plan": "how far is the prediction for two workers from what is measured?",
    "convergence": "does it learn as well as synchronous training?",
    "comparison": "the tables of what convergence found",
    "candidates": "which rules that others have published earn a place?",
    "kill": "what do the other replicas notice when a worker is killed?",
    "checkpoint": "how long does a replica stop for a checkpoint?",
    "parts": "what does it cost to have the data in many small parts?",
    "data": "what does it cost to have the data elsewhere than in memory?",
    "predict": "how much faster do two workers predict than one process?",
    "evaluate": "what do loss and metrics add to a forward pass over 1 M rows?",
    "predictor": "how many callers does a predictor answer, and how fast?",
    "telemetry": "what do the rows of `history.steps` cost?",
    "path": "how many modules and calls does an update pass through?",
    "report": "docs/benchmarks.md from the newest results",
    "compare": "ratios of this run beside benchmarks/baseline.json",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*QUESTIONS, *SCRIPTS], metavar="NAME")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if asked.name in QUESTIONS:
        module = importlib.import_module(f"benchmarks.{QUESTIONS[asked.name]}")
        module.QUESTION.main(asked.options)
    else:
        sys.argv[1:] = asked.options
        module_name = asked.name.replace("-", "_")
        runpy.run_module(f"benchmarks.{module_name}", run_name="__main__")


def _overview() -> str:
    lines = ["Tables of what daskdl costs and brings.", ""]
    lines += ["A table and a JSON file:", f"  {', '.join(QUESTIONS)}", ""]
    lines += ["Others:", *(f"  {name:14} {text}" for name, text in SCRIPTS.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
