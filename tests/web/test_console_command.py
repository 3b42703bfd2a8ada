"""`bartleby console`: where it listens, whom it lets in, what it is told."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from bartleby import Client
from bartleby.errors import InvalidSettings
from bartleby.surfaces.listening import listening
from bartleby.surfaces.web import ConsoleSettings, ProxySettings
from bartleby.surfaces.web.configuring import Serving, load
from tests.web.conftest import add_token

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


class Running:
    """A console that runs as its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        self.said: list[str] = []

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)


@pytest.fixture
def command(dsn: str, tmp_path: Path) -> Iterator[Callable[..., "Running"]]:
    """Start `bartleby console` on a free port, and wait until it says where it is."""
    with contextlib.ExitStack() as opened:

        def start(*words: str, address: str = dsn, port: str = "0", **more: str) -> Running:
            environment = {**os.environ, "BARTLEBY_DSN": address, "PYTHONUNBUFFERED": "1", **more}
            line = [sys.executable, "-m", "bartleby", "console", *(["--port", port] if port else []), *words]
            process = opened.enter_context(
                subprocess.Popen(
                    line, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
            opened.callback(process.kill)
            running = Running(process)
            assert process.stdout is not None
            assert process.stderr is not None
            stderr = process.stderr
            thread = threading.Thread(target=lambda: running.said.extend(stderr), daemon=True)
            thread.start()
            running.url = process.stdout.readline().strip()
            if not running.url:
                process.wait(30)
                thread.join(30)
            return running

        yield start


def test_it_serves_until_it_is_ended(command: Callable[..., Running]) -> None:
    running = command()
    assert re.fullmatch(r"http://localhost:\d+/", running.url)
    answer = httpx.get(f"{running.url}api/v1/health", timeout=30)
    assert answer.json()["status"] == "ok"
    assert "server" not in answer.headers
    assert httpx.get(f"{running.url}api/v1/openapi.json", timeout=30).status_code == 200
    assert running.end() == 0


def test_where_nobody_is_asked_another_name_is_not_answered(command: Callable[..., Running]) -> None:
    running = command("--allow-host", "ops.example")
    url = f"{running.url}api/v1/openapi.json"
    assert httpx.get(url, headers={"Host": "evil.example"}, timeout=30).status_code == 403
    assert httpx.get(url, headers={"Host": "ops.example"}, timeout=30).status_code == 200
    # what uvicorn would believe by itself from this machine
    forged = {"X-Forwarded-For": "10.0.0.1", "X-Forwarded-Proto": "https"}
    refused = httpx.get(url, headers=forged, timeout=30)
    assert refused.status_code == 403
    assert "--proxy" in refused.json()["hint"]


def test_ctrl_c_ends_it(command: Callable[..., Running]) -> None:
    assert command().end(signal.SIGINT) == 0


def test_it_starts_without_its_database(command: Callable[..., Running]) -> None:
    running = command(address="host=127.0.0.1 port=1 dbname=x")
    answer = httpx.get(f"{running.url}api/v1/health", timeout=30)
    assert (answer.status_code, answer.json()["status"]) == (503, "database away")


@pytest.mark.parametrize(
    "words",
    [["0.0.0.0"], ["::"], ["192.0.2.1", "--proxy", "10.0.0.0/8", "--proxy-user-header", ""]],  # noqa: S104
)
def test_beyond_this_machine_it_wants_somebody_to_have_a_token(
    command: Callable[..., Running], words: list[str]
) -> None:
    running = command("--host", *words)
    assert running.process.returncode == 1
    said = "".join(running.said)
    assert "beyond this machine" in said
    assert "bartleby tokens add NAME" in said


@pytest.mark.parametrize("words", [["--no-auth"], ["--no-auth", "--proxy", "10.0.0.0/8"]])
def test_beyond_this_machine_everybody_says_who_they_are(
    dsn: str, command: Callable[..., Running], words: list[str]
) -> None:
    add_token(dsn, "admin")
    running = command("--host", "0.0.0.0", *words)  # noqa: S104
    assert running.process.returncode == 1
    assert "bartleby tokens add NAME" in "".join(running.said)


def test_beyond_this_machine_a_token_opens_it(dsn: str, command: Callable[..., Running]) -> None:
    token = add_token(dsn, "reader")
    running = command("--host", "0.0.0.0")  # noqa: S104
    url = f"{running.url}api/v1/openapi.json"
    assert httpx.get(url, timeout=30).status_code == 401
    assert httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=30).status_code == 200
    assert httpx.get(url, headers={"X-Forwarded-User": "ann"}, timeout=30).status_code == 401


def test_on_this_machine_it_asks_if_it_is_told_to(command: Callable[..., Running]) -> None:
    running = command("--auth")
    assert httpx.get(f"{running.url}api/v1/openapi.json", timeout=30).status_code == 401


def test_a_proxy_in_front_of_it(command: Callable[..., Running]) -> None:
    words = ["--proxy", "127.0.0.0/8", "--proxy-user-header", "X-User", "--proxy-roles-header", "X-Groups"]
    running = command(*words, "--proxy-role", "sre=operator", "--prefix", "/ops/", "--environment", "production")
    assert running.url.endswith("/ops/")
    known = {"X-User": "ann", "X-Groups": "sre"}
    assert httpx.get(f"{running.url}api/v1/openapi.json", headers=known, timeout=30).status_code == 200
    stripped = running.url.replace("/ops/", "/api/v1/openapi.json")
    assert httpx.get(stripped, headers=known, timeout=30).status_code == 200
    assert httpx.get(stripped, headers={"X-User": "ann"}, timeout=30).status_code == 401
    login = httpx.get(stripped.replace("api/v1/openapi.json", "queues"), timeout=30)
    assert login.headers["location"] == "/ops/login?next=%2Fops%2Fqueues"


def test_a_port_that_is_taken(command: Callable[..., Running]) -> None:
    first = command()
    second = command(port=first.url.rpartition(":")[2].strip("/"))
    assert second.process.returncode == 1
    assert "--port" in "".join(second.said)


def test_without_the_extra_it_says_what_to_install(command: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError(\"No module named 'fastapi'\", name='fastapi')")
    running = command(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert running.process.returncode == 1
    assert "pip install 'bartleby[web]'" in "".join(running.said)


def read(folder: Path, variables: dict[str, str] | None = None, **arguments: object) -> Serving:
    return load(arguments, variables=variables or {}, directory=folder)


def test_settings_come_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "bartleby.toml").write_text(TOML)
    proxy = ProxySettings(("10.0.0.0/8",), roles_header="X-Groups", roles={"sre": "operator"})
    settings = ConsoleSettings(
        environment="staging", hosts=("ops.example",), hidden=("email",), session_hours=1.5, proxy=proxy
    )
    assert read(tmp_path) == Serving("127.0.0.1", 9000, None, settings)


def test_the_environment_goes_before_the_file_and_arguments_before_both(tmp_path: Path) -> None:
    (tmp_path / "bartleby.toml").write_text(TOML)
    said = {
        "BARTLEBY_CONSOLE_PORT": "9001",
        "BARTLEBY_CONSOLE_ENVIRONMENT": "production",
        "BARTLEBY_CONSOLE_AUTHENTICATE": "yes",
        "BARTLEBY_CONSOLE_HIDDEN": "email, phone",
        "BARTLEBY_CONSOLE_PROXY_ROLES": "boss=admin, sre=reader",
    }
    serving = read(tmp_path, said, port=9002, hosts=(), environment=None)
    assert (serving.port, serving.authenticate) == (9002, True)
    assert serving.settings.environment == "production"
    assert serving.settings.hidden == ("email", "phone")
    assert serving.settings.hosts == ("ops.example",)
    assert serving.settings.proxy is not None
    assert serving.settings.proxy.roles == {"boss": "admin", "sre": "reader"}


def test_a_proxy_can_be_one_that_knows_nobody(tmp_path: Path) -> None:
    nobody = ProxySettings(("10.0.0.0/8",), user_header=None)
    assert read(tmp_path, proxy_networks=("10.0.0.0/8",), proxy_user_header="").settings.proxy == nobody
    assert read(tmp_path, proxy_networks=("10.0.0.0/8",), proxy_user_header=None).settings.proxy != nobody
    (tmp_path / "bartleby.toml").write_text('[console.proxy]\nnetworks = ["10.0.0.0/8"]\nuser_header = ""\n')
    assert read(tmp_path).settings.proxy == nobody
    # an empty variable is one that nobody has set, as everywhere
    assert read(tmp_path, {"BARTLEBY_CONSOLE_PROXY_USER_HEADER": ""}).settings.proxy == nobody


def test_a_client_takes_no_notice_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bartleby.toml").write_text(f'dsn = "dbname=file"\n{TOML}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BARTLEBY_DSN", raising=False)
    assert Client()._settings.dsn == "dbname=file"


@pytest.mark.parametrize(
    ("text", "named"),
    [("port = 70000", "port"), ("port = true", "port"), ("colour = 1", "colour"), ("hosts = 3", "hosts"),
     ("authenticate = 'perhaps'", "authenticate"), ("session_hours = 0", "session_hours"), ("prefix = 3", "prefix"),
     ("proxy = 1", "proxy"), ("proxy = {user_header = 'x'}", "networks"), ("streams = 'many'", "streams"),
     ("proxy = {networks = ['10.0.0.1/8']}", "network"), ("proxy = {networks = []}", "networks"),
     ("proxy = {networks = ['10.0.0.0/8'], roles = {a = 'king'}}", "king")],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "bartleby.toml").write_text(f"[console]\n{text}\n")
    with pytest.raises(InvalidSettings, match=named):
        read(tmp_path)


@pytest.mark.parametrize("name", ["BARTLEBY_CONSOLE_PORT", "BARTLEBY_CONSOLE_PROXY_ROLES"])
def test_a_variable_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidSettings, match=f"^{name} cannot be "):
        read(tmp_path, {name: "x\x1b"})


def test_the_table_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "bartleby.toml").write_text("console = 3\n")
    with pytest.raises(InvalidSettings, match="console"):
        read(tmp_path)


def test_an_answer_does_not_wait_for_a_second_packet() -> None:
    # asyncio sends at once only on sockets that say that they are TCP: without that each answer took 44 ms, not 1.3 ms
    with listening("127.0.0.1", 0, option="--port") as opened:
        assert opened.proto == socket.IPPROTO_TCP
