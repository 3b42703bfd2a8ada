"""Every command that a page offers to copy is one that the command line takes."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import click
import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.surfaces import web
from bartleby.surfaces.cli import cli
from bartleby.surfaces.web.pages.showing import command
from tests.kit.shop import furnish

PAGES = (
    "/", "/groups", "/groups/{group}", "/letters", "/letters?filter=queue:orders", "/letters/{letter}",
    "/letters/{discarded}", "/letters/{held}", "/letters/{retried}", "/operations", "/operations/{draft}",
    "/operations/{edit}", "/operations/{stopped}", "/queues", "/queues/billing", "/queues/search.index", "/workers",
    "/sinks", "/audit", "/doctor", "/tokens",
)  # fmt: skip
TEMPLATES = Path(web.__file__).parent / "templates"


def parse(words: list[str]) -> None:
    """Take a command line apart as click does; nothing is run."""
    command: click.Command = cli
    name, arguments, context = words[0], words[1:], None
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        rest = [*context._protected_args, *context.args]
        if not isinstance(command, click.Group) or not rest:
            return
        found, inner, arguments = command.resolve_command(context, rest)
        assert inner is not None
        name, command = found or name, inner


def offered(text: str) -> Iterator[str]:
    for found in re.findall(r'data-copy="(bartleby [^"]*)"|<code>(bartleby [^<{]*)</code>', text):
        yield unescape("".join(found))


def test_a_command_that_is_none_is_found_out() -> None:
    parse(["bartleby", "replay", "7", "--reason", "x"])
    with pytest.raises(click.NoSuchOption):
        parse(["bartleby", "sinks", "add", "a", "webhook", "--set", "b=c"])


def test_commands_of_all_pages_can_be_typed(browser: TestClient, dsn: str) -> None:
    with Client(dsn) as client:
        ids = furnish(client)
        group = ids["group"]
        client.split_group(group, "payload.order.currency", "JPY", actor="ana", reason="another bug")
    seen = {each for path in PAGES for each in offered(browser.get(path.format(**ids)).text)}
    seen |= {each for path in TEMPLATES.glob("*.html") for each in offered(path.read_text())}
    assert len(seen) > 50
    for each in sorted(seen):
        try:
            parse(shlex.split(each))
        except click.ClickException as error:
            pytest.fail(f"{each}: {error.format_message()}")
    verbs = {" ".join(shlex.split(each)[1:3]) for each in seen}
    assert {
        "groups split",
        "groups rules",
        "workers drain",
        "tokens revoke",
        "sinks reconcile",
        "queues pause",
    } <= verbs


@pytest.mark.parametrize(
    "text", ["plain", "it's $(date) `id` \n !!", "\x1b[201~\x03\nrm -rf ~", "a\\b\u202e'c' é \U0001f4a5"]
)
def test_a_command_that_is_copied_is_one_word_to_a_shell_and_steers_no_terminal(text: str) -> None:
    line = command("dead", text)
    assert all(each.isprintable() or each == "\n" for each in line)
    shell = ["bash", "-c", f'bartleby() {{ printf "%s|%s" "$#" "$2"; }}; {line}']
    answer = subprocess.run(
        shell, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]}
    )
    assert answer.stdout.decode() == f"2|{text}"
