"""Settings: from arguments, then the environment, then `bartleby.toml`; checked once."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bartleby.errors import InvalidSettings

_MOST = 1000
_SINKS = "sinks"
_CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a process needs to know; `dsn` is None where the embedded PostgreSQL is meant."""

    dsn: str | None = None
    max_connections: int = 4
    connect_timeout: float = 10.0

    @classmethod
    def load(
        cls,
        *,
        environment: Mapping[str, str] = os.environ,
        directory: Path | None = None,
        **arguments: object,
    ) -> Self:
        """Return the settings: what is given here goes before BARTLEBY_*, and that before bartleby.toml."""
        file = (directory or Path.cwd()) / "bartleby.toml"
        settings = cls()
        if file.is_file():
            given = {name: value for name, value in _read(file).items() if name not in {_SINKS, _CONSOLE}}
            settings = settings.with_values(given, str(file))
        names = {f"BARTLEBY_{field.name.upper()}": field.name for field in fields(cls)}
        said = {name: environment[variable] for variable, name in names.items() if environment.get(variable)}
        settings = settings.with_values(said, "the environment")
        present = {name: value for name, value in arguments.items() if value is not None}
        return settings.with_values(present, "the arguments")

    def with_values(self, values: Mapping[str, Any], source: str) -> Self:
        """Return these settings with some replaced, or an error that names the one that cannot be used."""
        known = {field.name for field in fields(self)}
        checked: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise InvalidSettings(
                    f"unknown setting {name!r} in {source}",
                    hint=f"known settings: {', '.join(sorted(known))}",
                )
            checked[name] = _checked(name, value, source)
        return replace(self, **checked)

    def with_database(self) -> Self:
        """Return these settings if they name a database."""
        if not self.dsn:
            raise InvalidSettings(
                "no database: neither a DSN was given nor is BARTLEBY_DSN set",
                hint="give one, as in Bartleby('postgresql://…'), or set BARTLEBY_DSN; `bartleby dev` runs a PostgreSQL"
                " and prints its DSN, and Bartleby() finds it by itself",
            )
        return self


def sink_tables(directory: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the tables [sinks.NAME] of bartleby.toml, each with its kind; the rest of them the database checks."""
    file = (directory or Path.cwd()) / "bartleby.toml"
    found = _read(file).get(_SINKS, {}) if file.is_file() else {}
    if not isinstance(found, dict):
        raise InvalidSettings(f"{_SINKS} in {file} is no table", hint='[sinks.NAME] with kind = "nats", and so on')
    for name, table in found.items():
        if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
            hint = f'[sinks.{name}] with kind = "nats" and its options in [sinks.{name}.options]'
            raise InvalidSettings(f"sink {name!r} in {file} has no kind", hint=hint)
    return found


def console_table(directory: Path | None = None) -> dict[str, Any]:
    """Return the table [console] of bartleby.toml; the console checks it."""
    file = (directory or Path.cwd()) / "bartleby.toml"
    found = _read(file).get(_CONSOLE, {}) if file.is_file() else {}
    if not isinstance(found, dict):
        raise InvalidSettings(f"{_CONSOLE} in {file} is no table", hint="[console] with port = 8467, and so on")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"{file} cannot be read: {error}") from error


def _checked(name: str, value: object, source: str) -> object:
    match name:
        case "dsn":
            return _connection_string(str(value), source)
        case "max_connections":
            number, expected = _number(value, int), "a whole number from 1 to 1000"
        case _:
            number, expected = _number(value, float), "seconds, at most 1000"
    if number is None or not 0 < number <= _MOST:
        raise InvalidSettings(f"{name} in {source} is {value!r}; expected {expected}")
    return number


def _connection_string(value: str, source: str) -> str:
    try:
        conninfo_to_dict(value)
    except psycopg.Error:
        # What libpq says about it may quote the password.
        raise InvalidSettings(
            f"dsn in {source} is not a connection string",
            hint="postgresql://user:password@host:port/database, or host=… dbname=…",
        ) from None
    return value


def _number(value: object, kind: type[int | float]) -> float | None:
    try:
        return kind(str(value))
    except ValueError:
        return None
