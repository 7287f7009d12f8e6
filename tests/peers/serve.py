"""Requests, one JSON line each on standard input; answers, one JSON line each on standard output.

A peer's process is started once and asked now and then, so that its turns and the workbench's alternate. What a library
prints goes to standard error.
"""

import json
import os
import sys
import time
import traceback


def serve(handlers):
    """Answers until the input ends. An error of a handler is an answer too: {"error": …}."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("do")](**request)
        except Exception as error:  # said beside its row; the other rows go on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def seconds(perform, count=1):
    """Seconds a call, of so many in a row."""
    began = time.perf_counter()
    for _ in range(count):
        perform()
    return (time.perf_counter() - began) / count


def turns(variants, rounds, burst, first):
    """Bursts of each variant in an order that turns from round to round: seconds a step, by variant.

    Args:
        first: number of the first round, which settles who begins.
    """
    times = {name: [] for name in variants}
    names = list(variants)
    for turn in range(first, first + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(seconds(variants[name], burst))
    return times
