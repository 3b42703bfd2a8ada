"""The poison corpus and the database: payloads are refused or do not fit, and evidence of anything can be stored."""

import psycopg
import pytest

from bartleby import Client, Failure
from bartleby.errors import InvalidPayload, UndecodablePayload
from bartleby.failure import Recorder
from bartleby.typed import converter
from tests.kit import poison
from tests.kit.worker import Conn, present


@pytest.fixture
def client(dsn: str) -> Client:
    return Client(dsn)


def test_poison_payload_is_refused_by_send_or_does_not_fit(client: Client, conn: Conn) -> None:
    convert = converter(poison.Order)
    with client:
        client.create_queue("q")
        for name, payload in poison.PAYLOADS.items():
            try:
                conn.execute("select bartleby.send('q', %s::jsonb)", [payload.text])
            except psycopg.Error:
                assert payload.refused, name
                continue
            assert not payload.refused, name
            (message,) = present(client.claim("q", "w"))
            with pytest.raises((InvalidPayload, UndecodablePayload)):
                convert(message.payload)
            client.reject(message.lease_id, message.position, "unacceptable")
        assert len(client.dead_letters()) == sum(not payload.refused for payload in poison.PAYLOADS.values())


def test_evidence_of_every_exception_is_stored_as_it_is(client: Client) -> None:
    recorder = Recorder()
    with client:
        client.create_queue("q")
        for name in poison.EXCEPTIONS:
            client.send("q", name)
        lease = present(client.claim("q", "w", limit=len(poison.EXCEPTIONS)))
        found = {}
        for message in lease:
            try:
                poison.strike(message.payload)
            except BaseException as error:  # noqa: BLE001 - whatever it is
                found[message.id] = evidence = recorder.evidence("q", error)
            report = Failure(
                message.position, evidence.error_type, evidence.error, traceback=evidence.traceback,
                fingerprint=evidence.fingerprint, verdict="dead",
            )  # fmt: skip
            client.fail(lease.id, [report])
        letters = client.dead_letters(limit=1000)
        assert len(letters) == len(poison.EXCEPTIONS)
        for letter in letters:
            evidence = found[letter.message_id]
            assert (letter.error_type, letter.error, letter.traceback) == (
                evidence.error_type, evidence.error, evidence.traceback,
            )  # fmt: skip
