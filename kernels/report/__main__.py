"""Compile the kernels for targets that need not be here; the exit status is 1 when one of them is not fit to serve.

    variants.py   what is compiled: a written list, each planned by the functions that serve
    targets.py    what it is compiled for
    row.py        what came out of one compilation, and what is wrong with it
    compile.py    launch → machine code → row
    digests.py    which of it has been compiled before, as it is now
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace

from triton import knobs

from kernels.report import digests
from kernels.report.compile import examine, unexamined
from kernels.report.row import Row, problems
from kernels.report.table import table
from kernels.report.targets import TARGETS, Target
from kernels.report.variants import VARIANTS, Variant
from kernels.triton_backend.target import INTERPRETED

Job = tuple[Variant, Target]


def main(arguments: Sequence[str], variants: Sequence[Variant] = VARIANTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default=",".join(TARGETS), help="targets, a comma between them (all: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument(
        "--changed", action="store_true", help="only what was not clean already as it is, and always one of each kind"
    )
    parser.add_argument("--write-digest", action="store_true", help="remember what is clean, for --changed")
    options = parser.parse_args(arguments)
    names = options.arch.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target of that name: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if INTERPRETED:
        parser.error("Triton's interpreter is on, which compiles nothing: unset TRITON_INTERPRET")

    jobs = [(variant, TARGETS[name]) for name in names for variant in variants]
    known = digests.load()
    current = {job: digests.digest(*job) for job in jobs}
    stale = [job for job in jobs if known.get(job[1].name, {}).get(job[0].name) != current[job]]
    first_of_kind = {(variant.kernel, target.name): (variant, target) for variant, target in reversed(jobs)}
    due = [job for job in jobs if not options.changed or job in stale or job in first_of_kind.values()]
    rows = dict(zip(due, _rows(due), strict=True))

    if options.json:
        print(json.dumps([{**asdict(row), "problems": problems(row)} for row in rows.values()], indent=1))
    else:
        print(table(list(rows.values())))
    if options.changed:
        print(
            f"{len(jobs) - len(due)} of {len(jobs)} are as they were when found clean, and left out.", file=sys.stderr
        )
    if options.write_digest:
        clean = [job for job in jobs if job not in rows or not problems(rows[job])]
        digests.save(known | {name: {v.name: current[v, t] for v, t in clean if t.name == name} for name in names})
    elif stale:
        print(f"{len(stale)} are new or have changed: --write-digest remembers those that are clean.", file=sys.stderr)
    return int(any(problems(row) for row in rows.values()))


def _rows(jobs: Sequence[Job]) -> list[Row]:
    """Compile side by side, with a cache of our own: one that is lying about might hide a failure."""
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        workers = min(len(jobs), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            futures = [pool.submit(examine, *job) for job in jobs]
            return [_row(job, future) for job, future in zip(jobs, futures, strict=True)]


def _row(job: Job, future: Future[Row]) -> Row:
    try:
        return future.result()
    except BrokenProcessPool:
        return replace(unexamined(*job), error="the compiler crashed, over this or over what ran beside it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
