"""The gate is deterministic: nothing in it measures time, pages or throughput, or waits for real time to pass.

What measures lives in tests/nightly. tests/kit may read the clock only to stop waiting after a long time.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
MEASURING = {
    *("perf_counter", "process_time", "thread_time", "perf_counter_ns", "process_time_ns", "timeit", "getrusage"),
    *("pages_read", "processor_time"),
}
CLOCKS = {"monotonic", "time", "monotonic_ns", "time_ns", "clock_gettime"}
NOW = re.compile(r"(time|datetime|.*loop.*)\.(now|time|monotonic)\(")
WAITS = {"wait", "until", "join", "acquire", "result", "communicate", "timeout", "notifies"}
SHORTEST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 0.05, 60
SHORTEST_PATIENCE_SECONDS = 60
IN_TEXT = re.compile(
    r"(?:time\.|pg_)sleep\(([\d.]+)\)|explain (?:\([^)]*)?analy[sz]e|(?:now|clock_timestamp)\(\) - [%b]"
    r"|%s - (?:now|clock_timestamp)\(|_timeout = '[12]?\ds'"
)
# lines that a rule finds, though a slow machine cannot make them fail, and how often they occur
ALLOWED = {
    "unit/test_lanes.py time.monotonic() - 1": (1, "a lease that has lapsed"),
    "unit/test_lanes.py time.monotonic()": (2, "gives leases a deadline, and stops waiting"),
    "worker/test_stop.py time.monotonic()": (1, "compares with the last sign of life"),
    "client/test_testing_run.py asyncio.sleep(message.payload)": (1, "a handler that is interrupted"),
    "client/test_testing_run.py time.sleep(message.payload)": (1, "a handler that is interrupted"),
    "cli/test_work_terminal.py time.sleep(0.5)": (1, "gives a status line the chance to cut a printed line in two"),
    "cli/test_work_terminal.py process.wait(0.7)": (1, "sends the signal again until the process ends"),
}


def findings(tree: ast.AST, *, in_kit: bool) -> Iterator[str]:
    """Yield the code that measures, sleeps, waits briefly or reads a clock; in the kit only elapsed time."""
    for node in ast.walk(tree):
        if is_elapsed(node):
            yield ast.unparse(node)
        elif in_kit:
            continue
        elif measures(node) or sleeps(node) or gives_up_soon(node) or reads_clock(node) or is_deadline(node):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (found[0] for found in IN_TEXT.finditer(node.value) if not found[1] or is_long(float(found[1])))


def measures(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MEASURING


def sleeps(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".sleep") and is_real_time(node.args[0])


def gives_up_soon(node: ast.AST) -> bool:
    """Say whether this waits, but not for as long as a busy machine may take."""
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    limits = [each.value for each in node.keywords if each.arg == "timeout" and not called.endswith(".handler")]
    shortest = 1.0  # less is meant to be over
    if called.rpartition(".")[2] in WAITS or called == "asyncio.wait_for":
        limits += node.args[-1:]
        shortest = SHORTEST_SLEEP_SECONDS
    seconds = [each.value for each in limits if isinstance(each, ast.Constant)]
    return any(isinstance(each, int | float) and shortest < each < SHORTEST_PATIENCE_SECONDS for each in seconds)


def reads_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time"
    if isinstance(node, ast.Import):
        return any(each.name == "time" and each.asname for each in node.names)
    module, _, function = ast.unparse(node.func).rpartition(".") if isinstance(node, ast.Call) else ("", "", "")
    return (module == "time" and function in CLOCKS) or ("loop" in module and function == "time")


def is_real_time(seconds: ast.expr) -> bool:
    """Say whether a sleep lasts: not one that only yields, and not one of a handler that is meant never to end."""
    return not isinstance(seconds, ast.Constant) or (isinstance(seconds.value, int | float) and is_long(seconds.value))


def is_long(seconds: float) -> bool:
    return SHORTEST_SLEEP_SECONDS < seconds < LONGEST_SLEEP_SECONDS


def is_elapsed(node: ast.AST) -> bool:
    """Say whether this is the time between another moment and now."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and bool(NOW.match(ast.unparse(node.left)))
        and not ast.unparse(node.right).startswith("timedelta(")
    )


def is_deadline(node: ast.AST) -> bool:
    """Say whether this demands that now is before another moment."""
    if not isinstance(node, ast.Compare):
        return False
    operator, sides = node.ops[0], (node.left, node.comparators[0])
    if isinstance(operator, ast.Gt | ast.GtE):
        sides = sides[::-1]
    return isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and bool(NOW.match(ast.unparse(sides[0])))


def test_gate_does_not_measure_sleep_or_assert_elapsed_time() -> None:
    found = Counter(
        f"{name} {code}"
        for file in set(TESTS.rglob("*.py")) - {Path(__file__)}
        if (name := str(file.relative_to(TESTS))).partition("/")[0] not in {"nightly", "typing"}
        for code in findings(ast.parse(file.read_text()), in_kit=name.startswith("kit/"))
    )
    allowed = Counter({code: count for code, (count, _) in ALLOWED.items()})
    assert found - allowed == Counter(), (
        "wait with until(...), move Bartleby's clock, or move it to tests/nightly/timing"
    )
    assert allowed - found == Counter(), "no longer needed"


def test_rules_of_the_gate_find_what_they_forbid() -> None:
    forbidden = """
took = datetime.now(UTC) - began
assert loop.time() - began < 3
import time as clock
from time import monotonic
time.perf_counter()
time.sleep(1)
asyncio.sleep(delay)
process.wait(0.7)
done.wait(timeout=5)
asyncio.timeout(2)
asyncio.wait_for(ready(), 5)
until(ready, 2)
subprocess.run(command, timeout=5)
assert datetime.now(UTC) < began + timedelta(seconds=3)
conn.execute("explain (buffers, analyze) select 1")
conn.execute("set statement_timeout = '2s'")
conn.execute("select pg_sleep(3)")
"""
    harmless = "until(ready); time.sleep(0.01); done.wait(60); conn.execute('select pg_sleep(300)'); deadline - margin"
    for line in forbidden.strip().splitlines():
        assert list(findings(ast.parse(line), in_kit=False)) != [], line
    assert list(findings(ast.parse(harmless), in_kit=False)) == []
