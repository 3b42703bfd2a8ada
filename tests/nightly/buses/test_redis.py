"""The redis sink with a real server: keys, memory, roles, logins and sizes."""

from pathlib import Path

import pytest

from bartleby.errors import BartlebyError
from bartleby.sinks.publisher import Published, Publisher
from tests.kit.sinks.conformance import PATIENT, Open, event, events, ids_of, named, publish_all, stored_ids, why
from tests.kit.sinks.harness_redis import STREAM, Harness
from tests.kit.sinks.servers import eventually, free_port

pytestmark = pytest.mark.skipif(Harness.missing() is not None, reason=str(Harness.missing()))


@pytest.fixture
def publisher(opened: Open) -> Publisher:
    return opened()


async def ids(publisher: Publisher) -> list[str]:
    """Return what the stream has, each id once: a batch that took too long is sent again."""
    return list(dict.fromkeys(await stored_ids(publisher)))


async def test_entry_has_a_number_and_the_stream_a_key_and_a_length(
    sink: Harness, publisher: Publisher, opened: Open
) -> None:
    assert await ids(publisher) == []
    (outcome,) = await publisher.publish([event(1)])
    ((number, _),) = await sink.ask("XRANGE", STREAM, "-", "+")
    assert outcome == Published(number.decode())
    await sink.ask("XADD", STREAM, "*", "by", "another client")
    assert await ids(publisher) == [event(1)["id"]]
    await publish_all(publisher, events(1200, first=2))  # more than one page of XRANGE
    assert len(await ids(publisher)) == 1201
    chosen = opened(stream="letters", maxlen=500)
    await publish_all(chosen, events(3000))
    assert 500 <= await sink.ask("XLEN", "letters") < 1000
    assert (await ids(chosen))[-1] == event(3000)["id"]


async def test_server_that_takes_nothing_is_waited_for(sink: Harness, publisher: Publisher) -> None:
    troubles = [
        (f"SET {STREAM} hello", f"the key {STREAM} holds something that is no stream", f"DEL {STREAM}"),
        ("CONFIG SET maxmemory 100kb", "maxmemory", "CONFIG SET maxmemory 0"),
        (f"REPLICAOF 127.0.0.1 {free_port()}", "read only replica", "REPLICAOF NO ONE"),
    ]
    for number, (begin, reason, end) in enumerate(troubles):
        await sink.ask(*begin.split())
        batch = events(10, first=1 + 10 * number)
        outcomes = await publisher.publish(batch)
        assert named(outcomes) == ["Failed"] * 10, reason
        assert reason in why(outcomes[0])
        if number == 0:
            with pytest.raises(BartlebyError, match="cannot be read"):
                await ids(publisher)
        await sink.ask(*end.split())
        assert named(await publisher.publish(batch)) == ["Published"] * 10, reason
    assert await ids(publisher) == ids_of(events(30))


async def test_key_on_another_server_of_a_cluster_is_a_failure_that_names_it(tmp_path: Path) -> None:
    alone = {"appendonly": "no", "cluster-enabled": "yes"}  # the port of the cluster is 10,000 higher
    one, two = (Harness(tmp_path, **alone, **{"cluster-config-file": name}) for name in ("1", "2"))
    try:
        await one.start()
        await two.start()
        await two.ask("CLUSTER", "ADDSLOTS", *range(16384))
        await one.ask("CLUSTER", "MEET", "127.0.0.1", two.port)

        async def knows() -> bool:
            return b"cluster_state:ok" in await one.ask("CLUSTER", "INFO")

        await eventually(knows)
        publisher = one.publisher(PATIENT)
        reason = why((await publisher.publish([event(1)]))[0])
        slot = await one.ask("CLUSTER", "KEYSLOT", STREAM)
        assert f"is on another server of a Redis Cluster: {slot} 127.0.0.1:{two.port}" in reason
        await publisher.close()
    finally:
        await one.stop()
        await two.stop()


async def test_large_events_are_refused_and_large_batches_are_not(publisher: Publisher, opened: Open) -> None:
    limited = opened(max_bytes=2000)
    outcomes = await limited.publish([event(1), event(2, data_bytes=2000), event(3)])
    assert named(outcomes) == ["Published", "Refused", "Published"]
    assert "the sink takes 2000" in why(outcomes[1])
    batch = [event(number, data_bytes=100_000) for number in range(100, 200)]
    await publish_all(publisher, batch)
    assert (await ids(publisher))[2:] == ids_of(batch)


async def test_users_and_passwords_are_enforced(sink: Harness, opened: Open) -> None:
    await sink.ask("ACL", "SETUSER", "relay", "on", ">secret", "~bartleby:*", "+xadd")
    publisher = opened(user="relay", password="secret")
    assert named(await publisher.publish(events(3))) == ["Published"] * 3
    with pytest.raises(BartlebyError, match="no permissions"):
        await ids(publisher)
    await sink.ask("ACL", "SETUSER", "relay", "-xadd")
    assert "no permissions" in why((await publisher.publish([event(4)]))[0])
    await sink.ask("CONFIG", "SET", "requirepass", "secret")
    for options in ({}, {"url": f"redis://:wr0ng@127.0.0.1:{sink.port}"}):
        publisher = opened(**options)
        reason = why((await publisher.publish([event(1)]))[0])
        assert "uthentication" in reason or "password" in reason
        assert "wr0ng" not in reason
    publisher = opened(password="secret")
    assert named(await publisher.publish([event(1)])) == ["Published"]
