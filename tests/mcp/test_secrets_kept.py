"""Two hundred secrets in payloads, headers, errors and tracebacks: no tool tells any of them, nor does the audit."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from bartleby import Client, Failure
from tests.kit.agent import Agent

NAMES = (
    "password", "passwd", "Passphrase", "api_key", "apiKey", "x-api-key", "token", "access_token", "refreshToken",
    "client_secret", "credentials", "private_key", "Authorization", "Cookie", "set-cookie", "jwt", "auth", "pin", "ssn",
    "iban", "card_number", "cvv",
)  # fmt: skip
TEXTS = (
    "postgresql://bob:{}@db:5432/x failed", "redis://:{}@cache", "host=db user=bob password={} dbname=x",
    "password='{} {}' x", "PGPASSWORD={} psql", "Authorization: Bearer {}.1", "{{'Authorization': 'Basic {}cGFzcw=='}}",
    "Proxy-Authorization: Digest a={}", "headers={{'x-api-key': '{}'}}", '{{"api_key": "{}", "n": 1}}', "api-key: {}",
    "apikey={}", "Cookie: a={}; b=1", "Set-Cookie: sid={}; Path=/", "X-Auth-Token: {}",
    "aws_secret_access_key = {}/bPxR",
    "secret_key='{}'", "https://api/x?token={}&b=1", "access_token={}", "refresh_token: '{}'", "pwd={};",
    "https://x.s3.amazonaws.com/a?X-Amz-Signature={}&b=1", "AccountKey={}==;End", "Password: {}", "passphrase => {}",
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----", "pass\u200bword={}", "to\x1b[0mken={}",
)  # fmt: skip
SHAPES = ("ghp_{}{}", "sk_live_{}", "sk-proj-{}{}", "glpat-{}{}", "xoxb-{}", "npm_{}{}", "hf_{}{}", "whsec_{}")


def made() -> Iterator[str]:
    """Yield words that no other text has."""
    return (f"s3cr3t{number:04}word" for number in itertools.count())


def spoken(word: Callable[[], str]) -> str:
    """Return a text with secrets of every kind in it."""
    lines = []
    for template in (*TEXTS, *SHAPES):
        secret = word()
        lines.append(template.format(*[secret] * template.count("{}")))
    return "\n".join(lines)


def document(word: Callable[[], str]) -> dict[str, Any]:
    """Return a document with secrets under their names, some of them deep inside."""
    shallow: dict[str, Any] = {name: word() for name in NAMES[::2]}
    return shallow | {"list": [{"deep": {name: word() for name in NAMES[1::2]}}], "text": spoken(word)}


def test_no_tool_tells_a_secret(agent: Agent, client: Client) -> None:
    words = made()
    used: list[str] = []

    def word() -> str:
        used.append(next(words))
        return used[-1]

    client.send("orders", document(word), headers=document(word), key=f"password={word()}")
    [sent] = _die(client, spoken(word), f"Traceback (most recent call last):\n{spoken(word)}")
    assert len(used) > 180
    [group] = client.groups()
    plan = agent.plan(ids=[sent])
    answers = [
        agent.call("list_dead_letters").text,
        agent.call("get_dead_letter", message_id=sent).text,
        agent.call("list_groups").text,
        agent.call("get_group", group_id=group.id).text,
        agent.call("explain", message_id=sent).text,
        agent.call("replay_status", replay_id=plan["replay_id"]).text,
        json.dumps(plan),
        str(client.audit_log(limit=100)),
    ]
    assert "***" in answers[1]
    told = {secret for secret in used for answer in answers if secret in answer}
    assert told == set()


def _die(client: Client, error: str, traceback: str) -> list[int]:
    lease = client.claim("orders", "web-1")
    assert lease is not None
    failures = [Failure(each.position, "E", error, traceback, "f", verdict="dead") for each in lease]
    client.fail(lease.id, failures)
    return [int(each.id) for each in lease]
