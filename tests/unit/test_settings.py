"""Settings: arguments go before the environment, and the environment before bartleby.toml."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bartleby import AsyncClient, Client
from bartleby.config import Settings
from bartleby.errors import InvalidSettings
from bartleby.sinks.options import VARIABLES

TOML = 'dsn = "dbname=file"\nmax_connections = 7\nconnect_timeout = 2.5\n'
ENVIRONMENT = {"BARTLEBY_DSN": "dbname=environment", "BARTLEBY_MAX_CONNECTIONS": "9"}


def test_arguments_override_the_environment_and_the_environment_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bartleby.toml").write_text(TOML)
    from_file = Settings("dbname=file", 7, 2.5)
    rows: list[tuple[dict[str, str], dict[str, Any], Settings]] = [
        ({}, {}, from_file),
        (ENVIRONMENT, {}, Settings("dbname=environment", 9, 2.5)),
        (ENVIRONMENT, {"dsn": "dbname=argument", "connect_timeout": 1}, Settings("dbname=argument", 9, 1.0)),
        ({"BARTLEBY_DSN": ""}, {"dsn": None}, from_file),
        ({"BARTLEBY_SINK_DSN": "https://key@host/1", "BARTLEBY_SINK_SLACK": "y"}, {}, from_file),
    ]
    for environment, arguments, expected in rows:
        assert Settings.load(environment=environment, directory=tmp_path, **arguments) == expected, environment
    assert Settings.load(environment={}, directory=tmp_path / "nowhere") == Settings(None, 4, 10.0)
    assert not [field.name for field in fields(Settings) if f"BARTLEBY_{field.name.upper()}".startswith(VARIABLES)]
    monkeypatch.chdir(tmp_path)
    assert Settings.load(environment={}) == from_file, "the file is read from the working directory"


def test_unusable_value_is_named_with_its_source(tmp_path: Path) -> None:
    for text, problem in (
        ('dns = "x"', r"unknown setting 'dns' in .*bartleby\.toml"),
        ("max_connections = 0", "max_connections in .* is 0; expected a whole number from 1 to 1000"),
        ('max_connections = "many"', "max_connections in .* is 'many'"),
        ("connect_timeout = inf", "connect_timeout in .* expected seconds, at most 1000"),
        ('dsn = "what is this"', "dsn"),
        ("dsn = ", r"bartleby\.toml cannot be read"),
        ("\udcff", r"bartleby\.toml cannot be read"),
    ):
        (tmp_path / "bartleby.toml").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(InvalidSettings, match=problem):
            Settings.load(environment={}, directory=tmp_path)
    (tmp_path / "bartleby.toml").unlink()
    with pytest.raises(InvalidSettings, match="max_connections in the environment is 'x'"):
        Settings.load(environment={"BARTLEBY_MAX_CONNECTIONS": "x"}, directory=tmp_path)
    with pytest.raises(InvalidSettings, match="unknown setting 'dns' in the arguments"):
        Settings.load(environment={}, dns="x")


def test_client_without_a_database_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BARTLEBY_DSN", raising=False)
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidSettings, match="neither a DSN was given nor is BARTLEBY_DSN set") as caught:
            kind()
        assert "bartleby dev" in (caught.value.hint or "")
    with pytest.raises(InvalidSettings, match="dsn in the arguments") as caught:
        Settings.load(environment={}, dsn="postgresql://me:geheim%zz@host/db")
    assert "geheim" not in f"{caught.value} {caught.value.hint}", "a DSN that cannot be read is not shown"
    assert caught.value.__context__ is None or caught.value.__suppress_context__
