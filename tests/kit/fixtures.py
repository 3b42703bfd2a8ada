"""What tests of clients and commands share: a pgbouncer, every way to run a call, the command line."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bartleby import Bartleby, Client, dev, heartbeat, holding, janitor, replaying, worker
from bartleby.surfaces import pools
from bench import pooler
from tests.kit.commands import Done, terminal
from tests.kit.sinks.servers import free_port
from tests.kit.ways import WAYS, Way
from tests.kit.worker import LONG, CapturedLog


@pytest.fixture(scope="session")
def pgbouncer(server: dev.Server, scratch: Path) -> Iterator[int]:
    with pooler.pgbouncer(server, scratch, free_port()) as port:
        yield port


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    """An application with a queue `orders`."""
    made = Bartleby(dsn)
    made.client.create_queue("orders")
    yield made
    made.client.close()


@pytest.fixture
def client(app: Bartleby, dsn: str) -> Iterator[Client]:
    """A client that does not end with a worker of the application."""
    with Client(dsn) as opened:
        yield opened


@pytest.fixture
def patient_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of this process gives nothing up because the machine is slow.

    When it stops it waits for its last claims, settlements, reports and duties; a duty does not lapse because it is
    renewed late; and a solo message waits until it can run alone, unless the test says otherwise.
    """
    monkeypatch.setattr(worker, "_LAST_WORDS", LONG)
    monkeypatch.setattr(heartbeat, "_JOIN_SECONDS", LONG)
    for duty in (janitor, replaying):
        monkeypatch.setattr(duty, "_LEAVE_SECONDS", LONG)
        monkeypatch.setattr(duty, "_HOLD", 3600.0)
    monkeypatch.setattr(holding, "_PATIENT", LONG)
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)
    monkeypatch.setattr(holding, "_ALONE_IN_A_ROW", 3600.0)


@pytest.fixture
def patient_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of a surface wait longer for a connection, because the machine may be slow."""
    monkeypatch.setattr(pools, "_PATIENCE", LONG)
    monkeypatch.setattr("bartleby.client._REASON_SECONDS", LONG)


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with CapturedLog.capturing() as captured:
        yield captured


@pytest.fixture
def pooled_dsn(pgbouncer: int, server: dev.Server, dsn: str) -> str:
    return dsn.replace(f":{server.port}/", f":{pgbouncer}/")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.pgbouncer if "pgbouncer" in name else ()) for name in WAYS]
)
def way(request: pytest.FixtureRequest, dsn: str) -> Iterator[Way]:
    address = request.getfixturevalue("pooled_dsn") if "pgbouncer" in request.param else dsn
    with WAYS[request.param](address) as opened:
        yield opened


@pytest.fixture
def bartleby(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    monkeypatch.chdir(tmp_path)
    with terminal(dsn) as run:
        yield run
