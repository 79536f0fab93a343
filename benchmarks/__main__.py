"""Every question that this folder answers, by its name.

python -m benchmarks --help
python -m benchmarks links --rates unlimited 100mbit
"""

import argparse
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.results import Question

QUESTIONS = {
    "peers": "contest.PEERS",
    "links": "contest.LINKS",
    "time-to-accuracy": "time_to_accuracy.QUESTION",
    "lockstep": "lockstep.QUESTION",
    "scaling": "scaling.QUESTION",
    "emulation": "emulation.QUESTION",
    "cost-model": "cost_model.QUESTION",
    "step": "step.QUESTION",
    "encode": "encode.QUESTION",
    "cuda": "cuda.QUESTION",
    "wire-size": "wire_size.QUESTION",
    "first-step": "first_step.QUESTION",
    "start": "start.QUESTION",
    "memory": "memory.QUESTION",
    "channel": "channel.QUESTION",
    "plan": "plan.QUESTION",
    "data": "data.QUESTION",
    "parts": "data.SMALL_PARTS",
    "kill": "kill.QUESTION",
    "checkpoint": "checkpoint.QUESTION",
    "page": "page.QUESTION",
    "evaluate": "evaluate.QUESTION",
    "predict": "predict.QUESTION",
    "predict-in-memory": "predict.IN_MEMORY",
    "predictor": "predictor.QUESTION",
    "recommender": "recommender.QUESTION",
}
TOOLS = ("convergence", "path", "compare", "report")  # each has a `main` of its own


def question_of(name: str) -> "Question":
    module, _, attribute = QUESTIONS[name].partition(".")
    question: Any = getattr(importlib.import_module(f"benchmarks.{module}"), attribute)
    return question


def purpose(name: str) -> str:
    """What a question asks, or the first line of a tool.

    Example:
        >>> purpose("plan")
        'How far is the prediction for two workers from the measured speed?'
    """
    if name in QUESTIONS:
        text = question_of(name).text
    else:
        text = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
    if "Question: " not in text:
        return text.splitlines()[0]
    return " ".join(text.split("Question: ")[1].split("Counted: ")[0].split())


def main() -> None:
    names = [*QUESTIONS, *TOOLS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{', '.join(names)}: each has its own --help",
    )
    parser.add_argument("name", choices=names, metavar="NAME")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if asked.name in QUESTIONS:
        question_of(asked.name).main(asked.options)
    else:
        importlib.import_module(f"benchmarks.{asked.name}").main(asked.options)


if __name__ == "__main__":
    main()
