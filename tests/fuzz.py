"""Runs random programs, and prints each new kind of failure with the first program that fails in this way.

python tests/fuzz.py --start 1000 --count 500
"""

import argparse
import gc
import multiprocessing
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
import torch._dynamo  # otherwise each process would import it with its first dispatch mode
from random_programs.compare import Refused, Unrunnable
from random_programs.writer import source

FORK = multiprocessing.get_context("fork")
CHUNK = 50  # programs that run in one process
PATIENCE = 60  # seconds for one program
FINE = ("ok", "skip", "meant")  # the kinds of outcomes that are no failures


def outcome(text: str) -> Exception | None:
    """The exception that a program raises: `Unrunnable`, `Refused` or a failure; None if all results are the same."""
    try:
        exec(compile(text, "<program>", "exec"), {"__name__": "program"})
    except Exception as error:
        return error
    return None


def check(seeds: Sequence[int]) -> None:
    """Assert that these programs are right, and that at most half of them can't run or are refused by the package."""
    kinds = []
    for seed in seeds:
        error = outcome(source(seed))
        kinds.append(kind(error))
        if kinds[-1] not in FINE:
            raise AssertionError(f"The program of seed {seed} fails: {error!r}\n\n{source(seed)}") from error
    assert kinds.count("ok") >= len(kinds) / 2, kinds


def kind(error: Exception | None) -> str:
    """The kind of an outcome, one of `FINE` or a text; failures of one text probably have the same cause."""
    if error is None or isinstance(error, (Unrunnable, Refused)):
        return {Unrunnable: "skip", Refused: "meant"}.get(type(error), "ok")
    text = str(error).partition("\n")[0]
    if isinstance(error, AssertionError):
        text = text.partition(": at")[0]
    return f"{type(error).__name__}: " + re.sub(r"\d[\d.e+-]*", "#", text)[:160]


def messages(work: Callable[[Callable[[str], None]], None]) -> Iterator[str]:
    """What `work(send)` sends from a child process, and at last a text if the child crashes or is silent for long.

    This process never runs a program itself: autograd can't be used in children of a process that has used it.
    """
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=work, args=(theirs.send,))
    child.start()
    theirs.close()
    try:
        while ours.poll(PATIENCE):
            yield ours.recv()
        yield f"hangs for {PATIENCE} s"
    except EOFError:
        child.join()
        if child.exitcode:
            code = child.exitcode
            yield f"killed by {signal.Signals(-code).name}" if code < 0 else f"exits with {code}"
    finally:
        child.kill()
        child.join()


def alone(text: str) -> str:
    """The kind of a program's outcome in a process of its own."""
    return next(messages(lambda send: send(kind(outcome(text)))))


def in_a_row(first: int, count: int) -> Iterator[tuple[int, str]]:
    """The kinds of outcomes of programs that run in one process: seeds with kinds."""

    def work(send: Callable[[str], None]) -> None:
        for seed in range(first, first + count):
            send(kind(outcome(source(seed))))

    for seed, found in enumerate(messages(work), first):
        if seed < first + count:
            crashed = found.startswith("killed") and alone(source(seed).replace("\ncompare(", "\nonly_plain(")) == found
            yield seed, "skip" if crashed else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=int, default=int(time.time()), help="the first seed")
    parser.add_argument("--count", type=int, default=sys.maxsize // 2, help="number of programs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # the collector needn't visit existing objects in each measurement
    counts: Counter[str] = Counter()
    failures: dict[str, list[int]] = {}
    began, end = time.monotonic(), options.start + options.count
    with suppress(KeyboardInterrupt):
        for first in range(options.start, end, CHUNK):
            for seed, found in in_a_row(first, min(CHUNK, end - first)):
                counts[found if found in FINE else "failed"] += 1
                if found not in FINE:
                    failures.setdefault(found, []).append(seed)
                    if len(failures[found]) == 1:
                        print(f"\n=== seed {seed}: {found}\n{source(seed)}")
                        if alone(source(seed)) != found:
                            print(f"It fails only after other programs: --start {first} --count {seed - first + 1}")
            if time.monotonic() - began > options.seconds:
                break
            print(f"--- {counts.total()} programs up to seed {seed}: {dict(counts)}", flush=True)
    print(f"{counts.total()} programs from seed {options.start} in {time.monotonic() - began:.0f} s: {dict(counts)}")
    for text, seeds in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):5} x {text}; seeds {', '.join(map(str, seeds[:8]))}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
