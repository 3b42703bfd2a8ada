"""For your own tests: a database of its own for each, a worker that returns, failures on demand, and a clock to move.

    from bartleby.testing import assert_dead, bartleby_database, drain, fail_next, frozen_clock, run

    def test_an_order_without_a_customer_is_kept(bartleby_database: str) -> None:
        app.connect_to(bartleby_database)
        app.send("orders", {"id": 42})
        drain(app)
        assert_dead(app, "orders", error_type=KeyError)

    def test_an_order_has_a_customer() -> None:
        run(app, "orders", {"id": 42, "customer": 7})   # the handler alone: no database, no worker

`bartleby_database` is a fixture of pytest; nothing else here needs pytest, and it is not imported before that name is.
"""

from typing import TYPE_CHECKING, Any

from bartleby.testing.clock import Clock, frozen_clock
from bartleby.testing.failing import Failures, assert_dead, fail_next
from bartleby.testing.running import run
from bartleby.testing.working import adrain, drain

if TYPE_CHECKING:
    from bartleby.testing.fixture import bartleby_database

__all__ = [
    "Clock", "Failures", "adrain", "assert_dead", "bartleby_database", "drain", "fail_next", "frozen_clock", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the fixture, as pytest makes it
    if name != "bartleby_database":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bartleby.testing import fixture

    return fixture.bartleby_database
