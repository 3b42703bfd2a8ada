"""`bartleby console`: its address, the callers that it accepts, and its settings."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from fastapi import FastAPI

from bartleby import Client
from bartleby.errors import InvalidSettings
from bartleby.surfaces.cli import cli
from bartleby.surfaces.listening import listening, serve
from bartleby.surfaces.web import ConsoleSettings, ProxySettings
from bartleby.surfaces.web.configuring import Serving, load
from tests.kit.api import add_token, visiting

OPENAPI = "/api/v1/openapi.json"
MAIN = "from bartleby.surfaces.cli import main; main()"
TOML = """
[console]
port = 9000
environment = "staging"
hosts = ["ops.example"]
hidden = ["email"]
session_hours = 1.5

[console.proxy]
networks = ["10.0.0.0/8"]
roles_header = "X-Groups"
roles = { sre = "operator" }
"""


Command = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def command(dsn: str, tmp_path: Path) -> Iterator[Command]:
    """Start `bartleby console` on a free port."""
    with contextlib.ExitStack() as opened:

        def start(code: str = MAIN, **more: str) -> subprocess.Popen[str]:
            environment = {**os.environ, "BARTLEBY_DSN": dsn, "PYTHONUNBUFFERED": "1", **more}
            line, pipe = [sys.executable, "-c", code, "console", "--port", "0"], subprocess.PIPE
            process = subprocess.Popen(line, env=environment, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe)
            opened.enter_context(process)
            opened.callback(process.kill)
            return process

        yield start


@pytest.fixture
def served(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FastAPI]]:
    """Return the application that `bartleby console` would serve."""
    apps: list[FastAPI] = []
    monkeypatch.setattr("bartleby.surfaces.cli.console.serve", lambda app, *_: apps.append(app))

    def start(*words: str, address: str = dsn) -> FastAPI:
        done = CliRunner().invoke(cli, ["--dsn", address, "console", "--port", "0", *words])
        assert done.exit_code == 0, done.output
        return apps[-1]

    yield start
    for each in apps:
        each.state.house.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_a_console_with_open_streams(command: Command, how: signal.Signals) -> None:
    # no stream ends because it is cut off, or at the next beat
    patient = "from bartleby.surfaces import listening\nfrom bartleby.surfaces.web import live\n"
    running = command(f"{patient}listening._GRACE_SECONDS = live.BEAT = 3600\n{MAIN}")
    url = running.stdout.readline().strip() if running.stdout else ""
    assert re.fullmatch(r"http://localhost:\d+/", url)
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(httpx.Client(base_url=url, timeout=60))
        answer = client.get("api/v1/health")
        assert (answer.json()["status"], "server" in answer.headers) == ("ok", False)
        # uvicorn alone would trust this header from this machine
        assert client.get(OPENAPI, headers={"X-Forwarded-For": "10.0.0.1"}).status_code == 403
        streams = [opened.enter_context(client.stream("GET", "live")).iter_lines() for _ in range(3)]
        for lines in streams:
            assert any(each.startswith("event:") for each in lines)  # and not further
        running.send_signal(how)
        for lines in streams:  # each ends without another look at the database
            assert not [each for each in lines if each.startswith("event:")]
        _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors.endswith("stopped\n")) == (0, True)
    assert not any(each in errors for each in ("Traceback", "Cancelled", "Cancel "))


def test_signal_that_comes_with_the_address_stops_the_server() -> None:
    """Before uvicorn has its handlers, a signal that comes during an import would be swallowed."""
    handlers: list[object] = []

    def announce() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with listening("127.0.0.1", 0, option="--port") as opened, pytest.raises(KeyboardInterrupt):
            serve(FastAPI(), opened, announce)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [getattr(each, "__name__", "") for each in handlers] == ["handle_exit"]


def test_console_beyond_this_machine_does_not_start_without_authentication(dsn: str) -> None:
    def refused(*words: str) -> None:
        done = CliRunner().invoke(cli, ["--dsn", dsn, "console", "--port", "0", "--host", *words])
        assert done.exit_code == 1, words
        assert "bartleby tokens add NAME" in getattr(done.exception, "hint", ""), words

    for words in (["0.0.0.0"], ["::"], ["192.0.2.1", "--proxy", "10.0.0.0/8", "--proxy-user-header", ""]):  # noqa: S104
        refused(*words)
    add_token(dsn, "admin")
    for words in (["--no-auth"], ["--no-auth", "--proxy", "10.0.0.0/8"]):
        refused("0.0.0.0", *words)  # noqa: S104


def test_options_select_the_accepted_callers(dsn: str, served: Callable[..., FastAPI]) -> None:
    def status(app: FastAPI, host: str = "localhost", **headers: str) -> int:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return visiting(app, host=host).get(OPENAPI, headers=names).status_code

    local = served("--allow-host", "ops.example")
    assert [status(local, host) for host in ("localhost", "ops.example", "evil.example")] == [200, 200, 403]
    assert status(served("--auth")) == 401
    token, beyond = add_token(dsn, "reader"), served("--host", "0.0.0.0")  # noqa: S104
    assert (status(beyond), status(beyond, X_Forwarded_User="ann")) == (401, 401)
    assert status(beyond, Authorization=f"Bearer {token}") == 200
    words = ["--proxy", "127.0.0.0/8", "--proxy-user-header", "X-User", "--proxy-roles-header", "X-Groups"]
    behind = served(*words, "--proxy-role", "sre=operator", "--prefix", "/ops/", "--environment", "production")
    assert (status(behind, X_User="ann", X_Groups="sre"), status(behind, X_User="ann")) == (200, 401)
    assert visiting(behind).get("/queues").headers["location"] == "/ops/login?next=%2Fops%2Fqueues"


def test_console_starts_without_its_database(served: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.surfaces.pools._PATIENCE", 1.0)  # there is no answer to wait for
    answer = visiting(served(address="host=127.0.0.1 port=1 dbname=x")).get("/api/v1/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "database away")


def test_missing_extra_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError(\"No module named 'fastapi'\", name='fastapi')")
    running = command(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert "pip install 'bartleby[web]'" in running.communicate(timeout=60)[1]
    assert running.returncode == 1


def read(folder: Path, variables: dict[str, str] | None = None, **arguments: object) -> Serving:
    return load(arguments, variables=variables or {}, directory=folder)


def test_arguments_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bartleby.toml").write_text(f'dsn = "dbname=file"\n{TOML}')
    proxy = ProxySettings(("10.0.0.0/8",), roles_header="X-Groups", roles={"sre": "operator"})
    settings = ConsoleSettings(
        environment="staging", hosts=("ops.example",), hidden=("email",), session_hours=1.5, proxy=proxy
    )
    assert read(tmp_path) == Serving("127.0.0.1", 9000, None, settings)
    given = {
        "PORT": "9001", "ENVIRONMENT": "production", "AUTHENTICATE": "yes", "HIDDEN": "email, phone",
        "PROXY_ROLES": "boss=admin, sre=reader", "PROXY_USER_HEADER": "",
    }  # fmt: skip
    variables = {f"BARTLEBY_CONSOLE_{name}": value for name, value in given.items()}
    named = replace(proxy, roles={"boss": "admin", "sre": "reader"})
    settings = replace(settings, environment="production", hidden=("email", "phone"), proxy=named)
    found = read(tmp_path, variables, port=9002, hosts=(), environment=None)
    assert found == Serving("127.0.0.1", 9002, True, settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BARTLEBY_DSN", raising=False)
    assert Client()._settings.dsn == "dbname=file", "a client ignores the table of the console"
    networks = ("10.0.0.0/8",)
    for header, expected in (("", None), (None, proxy.user_header)):  # an empty variable counts as unset, as everywhere
        known = read(tmp_path, proxy_networks=networks, proxy_user_header=header).settings.proxy
        assert (known and known.user_header) == expected
    (tmp_path / "bartleby.toml").write_text('[console.proxy]\nnetworks = ["10.0.0.0/8"]\nuser_header = ""\n')
    assert read(tmp_path).settings.proxy == ProxySettings(networks, user_header=None)


def test_invalid_setting_is_named(tmp_path: Path) -> None:
    for text, named in (
        ("port = 70000", "port"), ("port = true", "port"), ("colour = 1", "colour"), ("hosts = 3", "hosts"),
        ("authenticate = 'perhaps'", "authenticate"), ("session_hours = 0", "session_hours"), ("prefix = 3", "prefix"),
        ("proxy = 1", "proxy"), ("proxy = {user_header = 'x'}", "networks"), ("streams = 'many'", "streams"),
        ("proxy = {networks = ['10.0.0.1/8']}", "network"), ("proxy = {networks = []}", "networks"),
        ("proxy = {networks = ['10.0.0.0/8'], roles = {a = 'king'}}", "king"),
    ):  # fmt: skip
        (tmp_path / "bartleby.toml").write_text(f"[console]\n{text}\n")
        with pytest.raises(InvalidSettings, match=named):
            read(tmp_path)
    (tmp_path / "bartleby.toml").write_text("console = 3\n")
    with pytest.raises(InvalidSettings, match="console"):
        read(tmp_path)
    (tmp_path / "bartleby.toml").unlink()
    for name in ("BARTLEBY_CONSOLE_PORT", "BARTLEBY_CONSOLE_PROXY_ROLES"):
        with pytest.raises(InvalidSettings, match=f"^{name} cannot be "):
            read(tmp_path, {name: "x\x1b"})


def test_listening_socket_is_known_as_tcp_and_a_taken_port_is_reported() -> None:
    # asyncio disables Nagle's algorithm only on such sockets: otherwise each answer took 44 ms instead of 1.3 ms
    with listening("127.0.0.1", 0, option="--port") as opened:
        assert opened.proto == socket.IPPROTO_TCP
        with pytest.raises(InvalidSettings) as refused, listening(*opened.getsockname(), option="--port"):
            pass
    assert "--port" in str(refused.value.hint)
