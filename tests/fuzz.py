"""Runs random programs until it is stopped, and prints each failing one: its seed, its source and the error.

python tests/fuzz.py --start 1000 --count 500 --jobs 2
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from program_writer import source
from programs import Refused, Unrunnable


def outcome(text: str) -> BaseException | None:
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


def kind(error: BaseException | None) -> str:
    """The kind of a failure. Failures of one kind probably have the same cause."""
    text = re.sub(r"\d[\d.e+-]*", "#", str(error).splitlines()[0] if str(error) else "")
    return f"{type(error).__name__}: {text[:160]}"


SIMPLER = (
    (r"@remat\(.*\)", "@remat"),
    (r"(remat\(.*), policy=.*\)", r"\1)"),
    (r"policy=[^=]*(, \w+=.*)?\)$", "policy=policies.everything_saveable)"),
    (r"^( *t\d+ = )[^=]*\b(t\d+)\b.*", r"\1\2"),
    (r"^( *t\d+ = ).*\b([tw]\d+)\b.*", r"\1\2"),
    (r"^( *t\d+ = ).*\b([tw]\d+)\b.*", r"\1\2.sin()"),
    (r"(compare\(make, )'[^']*'", r"\1'grad'"),
)


def shorter(lines: list[str], i: int) -> Iterator[list[str]]:
    """Simpler programs, one for each way to remove or simplify something at line `i`."""
    line = lines[i]
    depth = len(line) - len(line.lstrip())
    end = i + 1
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > depth):
        end += 1
    yield lines[:i] + lines[end:]
    if end > i + 1:  # the body of a block, without its head
        yield lines[:i] + [inner[4:] for inner in lines[i + 1 : end]] + lines[end:]
    for pattern, text in SIMPLER:
        if (changed := re.sub(pattern, text, line)) != line:
            yield [*lines[:i], changed, *lines[i + 1 :]]


def smallest(text: str, limit: float = 60.0) -> str:
    """Reduce a failing program to a smaller one that fails in the same way."""
    failure, lines, end = kind(outcome(text)), text.splitlines(), time.monotonic() + limit
    before: list[str] = []
    while before != lines:
        before, i = lines, 3
        while i < len(lines) and time.monotonic() < end:
            found = (new for new in shorter(lines, i) if kind(outcome("\n".join(new))) == failure)
            smaller = next(found, None)
            lines, i = (lines, i + 1) if smaller is None else (smaller, i)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=int, default=int(time.time()), help="the first seed")
    parser.add_argument("--count", type=int, default=0, help="number of programs; 0: no limit")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--patience", type=float, default=60, help="seconds to make a failing program smaller")
    parser.add_argument("--raw", action="store_true", help="print failing programs without reducing them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    began = reported = time.monotonic()
    seed = options.start
    try:
        while not options.count or seed < options.start + options.count:
            if time.monotonic() - began > options.seconds:
                break
            text = source(seed)
            error = outcome(text)
            name = type(error).__name__ if error is None or isinstance(error, (Refused, Unrunnable)) else "failed"
            counts[name] += 1
            if name == "failed":
                failures[kind(error)] += 1
                if failures[kind(error)] == 1:
                    print(f"\n=== seed {seed}\n{text if options.raw else smallest(text, options.patience)}\n")
                    traceback.print_exception(error, limit=-3)
            seed += 1
            if time.monotonic() - reported > 30:
                reported = time.monotonic()
                print(f"--- {sum(counts.values())} programs up to seed {seed}: {dict(counts)}", flush=True)
    except KeyboardInterrupt:
        pass
    print(
        f"{sum(counts.values())} programs from seed {options.start} in {time.monotonic() - began:.0f} s: {dict(counts)}"
    )
    for text, count in failures.most_common():
        print(f"{count:5} x {text}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
