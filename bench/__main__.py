"""Run with `python -m bench`."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import (
    attached,
    chart,
    console,
    draining,
    emitting,
    failing,
    history,
    letters,
    memory,
    pinned,
    report,
    sending,
    stock,
    waking,
    working,
)
from bench.lab import Findings, Lab

SCENARIOS: dict[str, Callable[[Lab], Findings]] = {
    "send": sending.send,
    "drain": draining.drain,
    "dead": failing.dead,
    "emission": emitting.emission,
    "pinned": pinned.pinned,
    "history": history.history,
    "depth": history.depth,
    "letters": letters.letters,
    "console": console.console,
    "wake": waking.wake,
    "memory": memory.memory,
    "work": working.work,
    "pgmq": attached.pgmq,
    "stock": stock.stock,
}


def main() -> int:
    """Measure, print the table, and say by the exit status whether every bar was reached."""
    options = parse()
    found: dict[str, Findings] = {}
    with Lab.opened(quick=options.quick, directory=options.dir) as lab:
        machine = lab.machine()
        print(f"PostgreSQL {machine['postgresql']}, {machine['cores']} cores", flush=True)
        for name in options.only or SCENARIOS:
            begin = time.monotonic()
            found[name] = SCENARIOS[name](lab)
            print(
                f"\n{name} ({time.monotonic() - begin:.0f} s)\n{report.table(found[name].figures)}",
                flush=True,
            )
    if options.json:
        report.save(options.json, machine, found)
    if options.chart:
        options.chart.write_text(chart.draw(found))
    figures = [figure for findings in found.values() for figure in findings.figures]
    missed = [figure.name for figure in figures if figure.passed is False]
    print(f"\nmissed: {', '.join(missed)}" if missed else "\nevery bar is reached")
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="measure Bartleby")
    parser.add_argument("--quick", action="store_true", help="a few minutes instead of half an hour, and noisier")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the chart, as SVG")
    parser.add_argument("--dir", type=Path, help="where the server lives meanwhile; it should be a disk")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
