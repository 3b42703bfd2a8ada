"""Mistakes of the first minutes: no database, an old schema."""

from pathlib import Path

import pytest

from bartleby import Bartleby, InvalidSettings, VersionMismatch, dev
from bartleby.version import __version__
from tests.cli.conftest import Conn
from tests.kit.worker import drain


def test_embedded_server_is_used_where_nothing_is_configured(
    server: dev.Server, conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BARTLEBY_DSN", "")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(dev, "default_directory", lambda: server.directory)
        app = Bartleby()
        assert (app.settings.dsn, app.configured.dsn) == (server.dsn, None)
        assert app.client.facts().data_directory == str(server.directory / "data")
        app.client.close()
        patched.setattr(dev, "default_directory", lambda: tmp_path / "none")
        with pytest.raises(InvalidSettings, match="no database") as caught:
            Bartleby().send("orders", 1)
    for each in ("Bartleby('postgresql://", "BARTLEBY_DSN", "bartleby dev"):
        assert each in (caught.value.hint or "")
    monkeypatch.setattr(dev, "running", lambda: pytest.fail("looked for the embedded server"))
    made = Bartleby()
    made.connect_to(dsn)
    monkeypatch.setenv("BARTLEBY_DSN", "postgresql://127.0.0.1/environment")
    assert made.settings.dsn == Bartleby(dsn).settings.dsn == dsn
    assert Bartleby().settings.dsn == "postgresql://127.0.0.1/environment"


def test_worker_starts_on_its_own_or_a_newer_schema_only(app: Bartleby, conn: Conn) -> None:
    app.handler("orders")(lambda _: None)
    for installed in (__version__, "0.10.0", "1.0.0"):
        conn.execute("update bartleby.installation set version = %s", [installed])
        app.send("orders", 1)
        assert drain(app) == {"done": 1}, installed
    conn.execute("update bartleby.installation set version = '0.0.9'")
    with pytest.raises(VersionMismatch, match=rf"version 0\.0\.9, and this is {__version__}") as caught:
        drain(app)
    assert caught.value.hint == "run: bartleby upgrade"
