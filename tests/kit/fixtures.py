"""What tests of clients and commands share: a pgbouncer, every way to run a call, the command line."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bartleby import Bartleby, dev
from bartleby.surfaces.cli import main
from bench import pooler
from tests.kit.commands import Done, checked
from tests.kit.ways import WAYS, Way
from tests.kit.worker import Told


@pytest.fixture(scope="session")
def pgbouncer(server: dev.Server, scratch: Path) -> Iterator[int]:
    """The port of a pgbouncer before the server."""
    with pooler.pgbouncer(server, scratch) as port:
        yield port


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    """An application with a queue `orders`."""
    made = Bartleby(dsn)
    made.client.create_queue("orders")
    yield made
    made.client.close()


@pytest.fixture
def told() -> Iterator[Told]:
    """What the library logs."""
    with Told.listening() as listening:
        yield listening


@pytest.fixture
def pooled_dsn(pgbouncer: int, server: dev.Server, dsn: str) -> str:
    """The test's own database, seen through pgbouncer."""
    return dsn.replace(f":{server.port}/", f":{pgbouncer}/")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.pgbouncer if "pgbouncer" in name else ()) for name in WAYS]
)
def way(request: pytest.FixtureRequest, dsn: str) -> Iterator[Way]:
    """Each way to run calls, one after the other."""
    address = request.getfixturevalue("pooled_dsn") if "pgbouncer" in request.param else dsn
    with WAYS[request.param](address) as opened:
        yield opened


@pytest.fixture
def bartleby(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    """Run the command line as `main` does, in this process, against the test's database."""
    monkeypatch.chdir(tmp_path)
    kept = signal.getsignal(signal.SIGTERM)

    def run(*words: str, stdin: str | bytes = "", address: str | None = dsn) -> Done:
        monkeypatch.setattr(sys, "argv", ["bartleby", *words])
        monkeypatch.setenv("BARTLEBY_DSN", address or "")
        with CliRunner().isolation(input=stdin) as (out, err, _), pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return checked(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())

    yield run
    signal.signal(signal.SIGTERM, kept)
