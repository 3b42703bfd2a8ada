"""The gate is deterministic: nothing in it measures time, pages or throughput, or waits for real time to pass.

What measures lives in tests/nightly. tests/kit may look at the clock, to give up waiting after a long time.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
MEASURING = {
    *("perf_counter", "process_time", "thread_time", "perf_counter_ns", "process_time_ns", "timeit", "getrusage"),
    *("pages_read", "processor_time"),
}
CLOCKS = {"monotonic", "time", "monotonic_ns", "time_ns"}
# files that may read the clock without asserting how much time has passed
READS_THE_CLOCK = {
    "unit/test_lanes.py": "gives leases a deadline, and gives up waiting",
    "worker/test_stop.py": "compares with the last sign of life",
}
SHORTEST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 0.05, 60


def gate() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(TESTS.rglob("*.py")):
        name = str(file.relative_to(TESTS))
        if name.partition("/")[0] not in {"nightly", "kit", "typing"}:
            yield name, ast.parse(file.read_text())


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def is_real_time(call: ast.Call) -> bool:
    """Say whether a sleep lasts: not one that only yields, and not one of a handler that is meant never to end."""
    seconds = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else 0
    return isinstance(seconds, int | float) and SHORTEST_SLEEP_SECONDS < seconds < LONGEST_SLEEP_SECONDS


def test_gate_neither_measures_nor_sleeps_nor_asserts_elapsed_time() -> None:
    measured, slept, clocks, allowed = [], [], [], set()
    for name, tree in gate():
        for function, call in calls(tree):
            here = f"{name}:{call.lineno} {ast.unparse(call)}"
            if function.rpartition(".")[2] in MEASURING:
                measured.append(here)
            elif function.rpartition(".")[2] == "sleep" and is_real_time(call):
                slept.append(here)
            elif function.startswith("time.") and function.removeprefix("time.") in CLOCKS:
                if name in READS_THE_CLOCK:
                    allowed.add(name)
                else:
                    clocks.append(here)
    assert measured == [], "move it to tests/nightly/timing"
    assert slept == [], "wait for a condition: until(...) in tests/kit"
    assert clocks == [], "wait with until(...), move Bartleby's clock, or move the test to tests/nightly/timing"
    assert allowed == READS_THE_CLOCK.keys()
