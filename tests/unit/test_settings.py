"""Settings: arguments go before the environment, and that before bartleby.toml."""

from dataclasses import fields
from pathlib import Path

import pytest

from bartleby import AsyncClient, Client
from bartleby.config import Settings
from bartleby.errors import InvalidSettings
from bartleby.sinks.options import VARIABLES

TOML = 'dsn = "dbname=file"\nmax_connections = 7\nconnect_timeout = 2.5\n'
ENVIRONMENT = {"BARTLEBY_DSN": "dbname=environment", "BARTLEBY_MAX_CONNECTIONS": "9"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bartleby.toml").write_text(TOML)
    return tmp_path


def test_without_anything_there_is_no_database(tmp_path: Path) -> None:
    assert Settings.load(environment={}, directory=tmp_path) == Settings(None, 4, 10.0)


def test_the_file_is_read(folder: Path) -> None:
    assert Settings.load(environment={}, directory=folder) == Settings("dbname=file", 7, 2.5)


def test_the_environment_goes_before_the_file(folder: Path) -> None:
    assert Settings.load(environment=ENVIRONMENT, directory=folder) == Settings("dbname=environment", 9, 2.5)


def test_a_secret_of_a_sink_is_no_setting(folder: Path) -> None:
    """Their variables have a name of their own, whatever settings there are."""
    sinks = {"BARTLEBY_SINK_DSN": "https://key@host/1", "BARTLEBY_SINK_SPOOL": "x", "BARTLEBY_SINK_SLACK": "y"}
    assert Settings.load(environment=sinks, directory=folder) == Settings("dbname=file", 7, 2.5)
    assert not [field.name for field in fields(Settings) if f"BARTLEBY_{field.name.upper()}".startswith(VARIABLES)]


def test_arguments_go_before_the_environment(folder: Path) -> None:
    loaded = Settings.load(environment=ENVIRONMENT, directory=folder, dsn="dbname=argument", connect_timeout=1)
    assert loaded == Settings("dbname=argument", 9, 1.0)


def test_an_argument_that_is_none_and_a_variable_that_is_empty_say_nothing(folder: Path) -> None:
    assert Settings.load(environment={"BARTLEBY_DSN": ""}, directory=folder, dsn=None).dsn == "dbname=file"


def test_the_file_is_looked_for_where_the_process_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert Settings.load(environment={}).dsn == "dbname=file"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('dns = "x"', r"unknown setting 'dns' in .*bartleby\.toml"),
        ("max_connections = 0", "max_connections in .* is 0; expected a whole number from 1 to 1000"),
        ("max_connections = -1", "max_connections"),
        ("max_connections = 1001", "max_connections"),
        ("max_connections = 2.5", "max_connections"),
        ("max_connections = true", "max_connections"),
        ('max_connections = "many"', "max_connections in .* is 'many'"),
        ("connect_timeout = 0", "connect_timeout"),
        ("connect_timeout = nan", "connect_timeout"),
        ("connect_timeout = inf", "connect_timeout in .* expected seconds, at most 1000"),
        ("connect_timeout = []", "connect_timeout"),
        ("spool = 5", 'spool in .* is 5; expected a directory, or "off"'),
        ('spool = ""', "spool"),
        ("dsn = 5", "dsn"),
        ('dsn = "what is this"', "dsn"),
        ("dsn = ", r"bartleby\.toml cannot be read"),
        ("\udcff", r"bartleby\.toml cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_source(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "bartleby.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidSettings, match=problem):
        Settings.load(environment={}, directory=tmp_path)


def test_an_unknown_setting_comes_with_those_that_are_known() -> None:
    with pytest.raises(InvalidSettings, match="unknown setting 'dns' in the arguments") as caught:
        Settings.load(environment={}, dns="x")
    assert caught.value.hint == "known settings: connect_timeout, dsn, max_connections, spool"


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="max_connections in the environment is 'x'"):
        Settings.load(environment={"BARTLEBY_MAX_CONNECTIONS": "x"}, directory=tmp_path)


def test_a_dsn_that_cannot_be_read_is_not_repeated() -> None:
    with pytest.raises(InvalidSettings, match="dsn in the arguments") as caught:
        Settings.load(environment={}, dsn="postgresql://me:geheim%zz@host/db")
    assert "geheim" not in f"{caught.value} {caught.value.hint}"
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_without_a_database_says_what_to_do(
    kind: type[Client | AsyncClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BARTLEBY_DSN", raising=False)
    with pytest.raises(InvalidSettings, match="neither a DSN was given nor is BARTLEBY_DSN set") as caught:
        kind()
    assert "bartleby dev" in (caught.value.hint or "")
