"""The command ``python -m tests.sim``: runs seeds, one after another, in processes.

A seed that fails is printed with the command that repeats it.
"""

import argparse
import multiprocessing
import time
from collections import Counter

from tests.sim.mutations import MUTATIONS, apply

# Seeds that find the faults of `mutations`, one of which each was chosen for. A change
# of the channel or of the simulation moves them: `--mutations` says which seeds find
# the faults now, and which ones none of these finds.
RARE = 72, 132, 148, 231, 251, 317, 1062, 1615, 2054, 2697, 2843, 7585  # faults
CROWDED = 54, 835  # 64 workers, in a mesh and with a relay
CHOSEN = (
    *(0, 1, 2, 3, 4, 5, 7, 14, 15, 17, 19, 20, 22, 31, 41, 44, 56, 77, 79, 82, 86, 122),
    *(150, 156, 241, 333, 391, 423, 868),
    *(66, 92, 115, 162, 169, 194, 647),  # damaged updates, replaced and not
    *(9, 149, 240),  # snapshots over narrow links
    *RARE,
    *(152, 392),  # many workers that join at once, with a relay and in a mesh
    *CROWDED,
)


def begin(mutation):
    """Prepare a process; nothing of daskdl may be imported before."""
    if mutation:
        apply(mutation)
    import logging

    import torch

    torch.set_num_threads(1)
    logging.disable()  # a run warns of what the faults do


def run_seed(seed, trace=None):
    """Run one seed: its outcome, or the text of its failure."""
    from tests.sim import scenario

    try:
        return scenario.run(scenario.Scenario.of(seed), trace)
    except scenario.Violation as violation:
        return f"{violation} {' '.join(getattr(violation, '__notes__', ()))}"


def report(seed, failure):
    """What is said of a seed that has failed."""
    from tests.sim.scenario import Scenario
    from tests.sim.world import Trace

    trace = Trace()
    run_seed(seed, trace)
    return (
        f"\n{trace.last()}\n\nseed {seed}: {failure}\n{Scenario.of(seed)}\n"
        f"repeat it: python -m tests.sim --seed {seed} --trace trace.txt"
    )


def run_one(seed, path):
    """Run one seed, and write its trace."""
    from tests.sim.world import Trace

    trace = Trace(whole=True)
    outcome = run_seed(seed, trace)
    if path:
        with open(path, "w") as file:
            file.write("\n".join(trace.lines) + "\n")
    if isinstance(outcome, str):
        print(report(seed, outcome))
        return 1
    print(f"seed {seed}: {trace.count} lines, checksum {trace.digest}")
    print(f"{outcome.now:.1f} s, {outcome.events} events, error: {outcome.error}")
    return 0


def run_all(seeds, jobs, mutation):
    """Run seeds until one fails, print figures; return the failing seed or None."""
    started, events, happened, checks = time.monotonic(), 0, Counter(), Counter()
    ends, virtual_s, count = Counter(), 0.0, 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, begin, (mutation,)) as pool:
        for seed, outcome in zip(seeds, pool.imap(run_seed, seeds), strict=True):
            if isinstance(outcome, str):
                if mutation:
                    return seed, outcome
                pool.terminate()
                begin(None)
                print(report(seed, outcome))
                return seed, outcome
            count += 1
            events += outcome.events
            virtual_s += outcome.now
            happened.update(outcome.happened)
            checks.update(outcome.checks)
            ends["a model" if outcome.error is None else outcome.error[0]] += 1
            ends["resumed by another fit"] += outcome.resumed
    if mutation:
        return None
    took_s = time.monotonic() - started
    print(f"{count} seeds without a violation in {took_s:.0f} s, {jobs} processes")
    print(f"{events:,} events in {virtual_s:,.0f} virtual seconds of training")
    for title, counted in (("ends", ends), ("faults", happened), ("checks", checks)):
        listed = ", ".join(f"{name} {n:,}" for name, n in sorted(counted.items()))
        print(f"{title}: {listed}")
    return None


def run_mutations(names, seeds, jobs):
    """Look for each mutation; print after how many seeds it was found."""
    killed = 0
    for name in names:
        failed = run_all(seeds, jobs, name)
        killed += failed is not None
        verdict = (
            "not found" if failed is None else f"seed {failed[0]}: {failed[1][:150]}"
        )
        print(f"{name}: {verdict}", flush=True)
    print(f"{killed} of {len(names)} found within {len(seeds)} seeds")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, help="default: those chosen, then others")
    parser.add_argument("--chosen", action="store_true", help="only those chosen")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="run only this one")
    parser.add_argument("--trace", help="with --seed: a file for the whole trace")
    parser.add_argument("--mutation", choices=MUTATIONS, metavar="NAME")
    parser.add_argument("--mutations", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first or 0, (options.first or 0) + options.seeds)
    if options.chosen:
        seeds = CHOSEN
    elif options.first is None:
        seeds = [*CHOSEN, *(seed for seed in seeds if seed not in CHOSEN)]
        seeds = seeds[: options.seeds]
    if options.seed is not None:
        begin(options.mutation)
        return run_one(options.seed, options.trace)
    if options.mutation or options.mutations:
        names = [options.mutation] if options.mutation else list(MUTATIONS)
        return run_mutations(names, seeds, options.jobs)
    return int(run_all(seeds, options.jobs, None) is not None)
