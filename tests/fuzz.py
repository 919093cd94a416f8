"""Runs random programs, and prints each new kind of failure with a small program that fails in the same way.

python tests/fuzz.py --start 1000 --count 500
"""

from __future__ import annotations

import argparse
import ast
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


def outcome(text: str) -> Exception | None:
    """The exception that a program raises: `Unrunnable`, `Refused` or a failure; None if all results are the same."""
    try:
        exec(compile(text, "<program>", "exec"), {"__name__": "program"})
    except Exception as error:
        return error
    return None


def check(seeds: Sequence[int]) -> None:
    """Assert that these programs are right, and that at most half of them can't run or are refused by the package."""
    skipped = []
    for seed in seeds:
        text = source(seed)
        error = outcome(text)
        if isinstance(error, (Refused, Unrunnable)):
            skipped.append(error)
        elif error is not None:
            raise AssertionError(f"The program of seed {seed} fails: {error!r}\n\n{text}") from error
    assert len(skipped) <= len(seeds) / 2, skipped


def kind(error: Exception | None) -> str:
    """The kind of an outcome: `ok`, `skip`, `meant`, or a text; failures of one text probably have the same cause."""
    if error is None or isinstance(error, (Unrunnable, Refused)):
        return {Unrunnable: "skip", Refused: "meant"}.get(type(error), "ok")
    text = str(error).partition("\n")[0]
    if isinstance(error, AssertionError):
        text = text.partition(": at")[0]
    return f"{type(error).__name__}: " + re.sub(r"\d[\d.e+-]*", "#", text)[:160]


def messages(work: Callable[[Callable[[str], None]], None], patience: float) -> Iterator[str]:
    """What `work(send)` sends from a child process, and at last a text if the child crashes or is silent for long.

    This process never runs a program itself: autograd can't be used in children of a process that has used it.
    """
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=work, args=(theirs.send,))
    child.start()
    theirs.close()
    try:
        while ours.poll(patience):
            yield ours.recv()
        yield f"hangs for {patience:.0f} s"
    except EOFError:
        child.join()
        if child.exitcode:
            code = child.exitcode
            yield f"killed by {signal.Signals(-code).name}" if code < 0 else f"exits with {code}"
    finally:
        child.kill()
        child.join()


def alone(text: str, patience: float = 60) -> str:
    """The kind of a program's outcome in a process of its own."""
    return next(messages(lambda send: send(kind(outcome(text))), patience))


def in_a_row(first: int, count: int, patience: float = 60) -> Iterator[tuple[int, str]]:
    """The kinds of outcomes of programs that run in one process: seeds with kinds."""

    def work(send: Callable[[str], None]) -> None:
        for seed in range(first, first + count):
            send(kind(outcome(source(seed))))

    for seed, found in enumerate(messages(work, patience), first):
        if seed < first + count:
            crashed = found.startswith("killed") and alone(source(seed).replace("\ncompare(", "\nonly_plain(")) == found
            yield seed, "skip" if crashed else found


def simpler(text: str) -> Iterator[str]:
    """Programs without a statement, decorator or argument, or with a part of a block or expression in its place."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            places = value if isinstance(value, list) else [value]
            for i, old in enumerate(places):
                ways: list[list] = []
                if isinstance(value, list):
                    ways += [[], *([old.body] if isinstance(getattr(old, "body", None), list) else [])]
                if isinstance(old, ast.expr):
                    ways += [[part] for part in ast.iter_child_nodes(old) if isinstance(part, ast.expr)]
                for way in ways:
                    setattr(node, field, [*places[:i], *way, *places[i + 1 :]] if isinstance(value, list) else way[0])
                    with suppress(Exception):  # it is no program
                        yield ast.unparse(tree)
                    setattr(node, field, value)


def smallest(text: str, limit: float) -> str:
    """Reduce a failing program to a smaller one that fails in the same way."""
    failure, end = alone(text), time.monotonic() + limit
    tries, place, failed = list(simpler(text)), 0, 0
    while failed < len(tries) and time.monotonic() < end:
        smaller = tries[place % len(tries)]
        if len(smaller) < len(text) and alone(smaller) == failure:
            text, tries, failed = smaller, list(simpler(smaller)), 0
        else:
            place, failed = place + 1, failed + 1
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=int, default=int(time.time()), help="the first seed")
    parser.add_argument("--count", type=int, default=sys.maxsize // 2, help="number of programs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--patience", type=float, default=60, help="seconds to reduce a failing program, or 0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # the collector needn't visit existing objects in each measurement
    counts: Counter[str] = Counter()
    failures: dict[str, list[int]] = {}
    began, end = time.monotonic(), options.start + options.count
    with suppress(KeyboardInterrupt):
        for first in range(options.start, end, CHUNK):
            for seed, found in in_a_row(first, min(CHUNK, end - first)):
                counts[found if found in ("ok", "skip", "meant") else "failed"] += 1
                if found not in ("ok", "skip", "meant"):
                    failures.setdefault(found, []).append(seed)
                    if len(failures[found]) == 1:
                        report(seed, first, found, options.patience)
            if time.monotonic() - began > options.seconds:
                break
            print(f"--- {counts.total()} programs up to seed {seed}: {dict(counts)}", flush=True)
    print(f"{counts.total()} programs from seed {options.start} in {time.monotonic() - began:.0f} s: {dict(counts)}")
    for text, seeds in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):5} x {text}; seeds {', '.join(map(str, seeds[:8]))}")
    return bool(failures)


def report(seed: int, first: int, found: str, patience: float) -> None:
    """Print a failing program, and how to repeat it."""
    text = source(seed)
    print(f"\n=== seed {seed}: {found}")
    if alone(text) != found:
        print(f"This happens only after other programs: --start {first} --count {seed - first + 1}")
    elif patience:
        text = smallest(text, patience)
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
