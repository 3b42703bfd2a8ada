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
            settings = settings.with_values(_read(file), str(file))
        names = {f"BARTLEBY_{field.name.upper()}": field.name for field in fields(cls)}
        given = {name: environment[variable] for variable, name in names.items() if environment.get(variable)}
        settings = settings.with_values(given, "the environment")
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
