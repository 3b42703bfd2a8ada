"""Run what is too long or too sensitive for the gate, group by group: `python tools/nightly.py [GROUP …]`.

Each group is a folder of tests/nightly. `timing` runs in one process, because it measures. The report is
.cache/nightly/report.md, with pytest's output for each group beside it.
"""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / ".cache" / "nightly"
GROUPS = sorted(path.name for path in (ROOT / "tests" / "nightly").iterdir() if path.is_dir() and path.name[0] != "_")
ALONE = "timing"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one group went."""

    group: str
    passed: bool
    summary: str
    seconds: float


def main() -> int:
    """Run the groups one after the other, write the report, and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"default: {' '.join(GROUPS)}")
    groups = parser.parse_args().groups or GROUPS
    if unknown := [group for group in groups if group not in GROUPS]:
        parser.error(f"unknown group: {', '.join(unknown)}; choose from {', '.join(GROUPS)}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    outcomes = [run(group) for group in groups]
    report = render(outcomes)
    (OUTPUT / "report.md").write_text(report)
    print(f"\n{report}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def run(group: str) -> Outcome:
    """Run one group; its output goes to the terminal and to a file."""
    print(f"\n=== {group}", flush=True)
    command = [sys.executable, "-m", "pytest", f"tests/nightly/{group}", "--timeout", "3600"]
    if group != ALONE:
        command += ["-n", "2", "--dist", "worksteal"]
    began = time.monotonic()
    last = ""
    with (
        (OUTPUT / f"{group}.log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            print(line, end="", flush=True)
            last = line.strip() or last
    summary = re.sub(r"^=+ | in [\d.]+s.*$", "", last)
    passed = process.returncode == 0 and " passed" in summary  # a group that was skipped has shown nothing
    return Outcome(group, passed, summary, time.monotonic() - began)


def render(outcomes: list[Outcome]) -> str:
    """Return the report: a line for each group."""
    lines = ["| group | result | tests | minutes |", "|---|---|---|---|"]
    lines += [
        f"| {each.group} | {'passed' if each.passed else 'FAILED'} | {each.summary} | {each.seconds / 60:.1f} |"
        for each in outcomes
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
