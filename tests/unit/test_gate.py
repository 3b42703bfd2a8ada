"""The gate is deterministic: nothing in it measures time, pages or throughput, or waits for real time to pass.

What measures lives in tests/nightly. tests/kit may read the clock only to stop waiting after a long time.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
MEASURING = {
    *("perf_counter", "process_time", "thread_time", "perf_counter_ns", "process_time_ns", "timeit", "getrusage"),
    *("pages_read", "processor_time"),
}
CLOCKS = {"monotonic", "time", "monotonic_ns", "time_ns", "clock_gettime"}
SHORTEST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 0.05, 60
IN_TEXT = re.compile(
    r"time\.sleep\(([\d.]+)\)|explain \(?analy[sz]e|(?:now|clock_timestamp)\(\) - [%b]|%s - (?:now|clock_timestamp)\("
)
# lines that a rule finds, though a slow machine cannot make them fail
ALLOWED = {
    "unit/test_lanes.py time.monotonic()": "gives leases a deadline, and stops waiting",
    "worker/test_stop.py time.monotonic()": "compares with the last sign of life",
    "client/test_testing_run.py asyncio.sleep(message.payload)": "a handler that is interrupted",
    "client/test_testing_run.py time.sleep(message.payload)": "a handler that is interrupted",
    "cli/test_work_terminal.py time.sleep(0.5)": "gives a status line the chance to cut a printed line in two",
}


def findings(tree: ast.AST, *, in_kit: bool) -> Iterator[str]:
    """Yield the code that measures, sleeps or reads a clock; in the kit only what compares elapsed time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(is_elapsed(part) for part in ast.walk(node)):
            yield ast.unparse(node)
        elif in_kit:
            continue
        elif measures(node) or sleeps(node) or reads_clock(node):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (found[0] for found in IN_TEXT.finditer(node.value) if not found[1] or is_long(float(found[1])))


def measures(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MEASURING


def sleeps(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".sleep") and is_real_time(node.args[0])


def reads_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time"
    module, _, function = ast.unparse(node.func).rpartition(".") if isinstance(node, ast.Call) else ("", "", "")
    return (module == "time" and function in CLOCKS) or ("loop" in module and function == "time")


def is_real_time(seconds: ast.expr) -> bool:
    """Say whether a sleep lasts: not one that only yields, and not one of a handler that is meant never to end."""
    return not isinstance(seconds, ast.Constant) or (isinstance(seconds.value, int | float) and is_long(seconds.value))


def is_long(seconds: float) -> bool:
    return SHORTEST_SLEEP_SECONDS < seconds < LONGEST_SLEEP_SECONDS


def is_elapsed(node: ast.AST) -> bool:
    """Say whether this is the time between now and another moment."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and any(
            re.match(r"(time|datetime|.*loop.*)\.(now|time|monotonic)\(", ast.unparse(each))
            for each in (node.left, node.right)
        )
    )


def test_gate_does_not_measure_sleep_or_assert_elapsed_time() -> None:
    found = {
        f"{name} {code}"
        for file in set(TESTS.rglob("*.py")) - {Path(__file__)}
        if (name := str(file.relative_to(TESTS))).partition("/")[0] not in {"nightly", "typing"}
        for code in findings(ast.parse(file.read_text()), in_kit=name.startswith("kit/"))
    }
    assert found - ALLOWED.keys() == set(), (
        "wait with until(...), move Bartleby's clock, or move it to tests/nightly/timing"
    )
    assert ALLOWED.keys() - found == set(), "no longer needed"
