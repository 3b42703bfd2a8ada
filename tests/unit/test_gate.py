"""The gate is deterministic: nothing in it measures time, pages or throughput, or waits for real time to pass.

What measures lives in tests/nightly. tests/kit may look at the clock, to give up waiting after a long time.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
MEASURING = {
    *("time.time", "time.monotonic", "time.perf_counter", "time.process_time", "time.thread_time", "time.time_ns"),
    *("perf_counter", "monotonic", "process_time", "timeit.timeit", "resource.getrusage", "tracemalloc.start"),
    *("pages_read", "processor_time"),
}
SLEEPING = {"time.sleep", "asyncio.sleep", "sleep"}


def gate() -> Iterator[Path]:
    for file in sorted(TESTS.rglob("*.py")):
        if file.relative_to(TESTS).parts[0] not in {"nightly", "kit", "typing"}:
            yield file


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_test_of_the_gate_measures() -> None:
    found = [
        f"{file.relative_to(TESTS)}:{call.lineno} {name}"
        for file in gate()
        for name, call in calls(file)
        if name in MEASURING
    ]
    assert found == [], "move it to tests/nightly/timing, or move Bartleby's clock instead"


def test_no_test_of_the_gate_sleeps() -> None:
    # sleep(0) yields to others, and a handler that sleeps for an hour is one that never ends
    found = [
        f"{file.relative_to(TESTS)}:{call.lineno} {ast.unparse(call)}"
        for file in gate()
        for name, call in calls(file)
        if name in SLEEPING
        and not (
            call.args
            and isinstance(call.args[0], ast.Constant)
            and (call.args[0].value == 0 or call.args[0].value >= 60)
        )
    ]
    assert found == [], "wait for a condition: until(...) in tests/kit"
