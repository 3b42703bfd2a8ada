"""The table for people and the JSON for programs."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.lab import Figure, Findings

MARKS = {True: "pass", False: "MISS", None: ""}


def table(figures: Sequence[Figure]) -> str:
    """Every figure on a line, with its bar and whether it is reached."""
    lines = [("", "bartleby", "", "other", "ratio", "bar", "")]
    for figure in figures:
        other = f"{number(figure.other)} {figure.against}" if figure.other is not None else ""
        ratio = f"{figure.ratio:.2f}" if figure.ratio is not None else ""
        bar = str(figure.bar) if figure.bar else ""
        lines.append((figure.name, number(figure.ours), figure.unit, other, ratio, bar, MARKS[figure.passed]))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = {0, 2, 3, 5, 6}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def number(value: float) -> str:
    """With as many digits as mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def save(path: Path, machine: Mapping[str, str | int], found: Mapping[str, Findings]) -> None:
    """Write everything that was measured as JSON; what the file has of other scenarios and other servers stays."""
    scenarios = {
        name: {
            "figures": [
                {
                    **{key: rounded(value) for key, value in dataclasses.asdict(figure).items() if key != "paired"},
                    "ratio": rounded(figure.ratio),
                    "bar": str(figure.bar) if figure.bar else None,
                    "passed": figure.passed,
                }
                for figure in findings.figures
            ],
            "series": {key: [rounded(value) for value in values] for key, values in findings.series.items()},
        }
        for name, findings in found.items()
    }
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    [mine] = [run for run in runs if run["machine"]["postgresql"] == machine["postgresql"]] or [{"scenarios": {}}]
    run = {"machine": machine, "scenarios": mine["scenarios"] | scenarios}
    path.write_text(json.dumps({"runs": [each for each in runs if each is not mine] + [run]}, indent=1) + "\n")


def rounded(value: object) -> object:
    """Four significant digits: the rest is noise."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
