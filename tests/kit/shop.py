"""A shop in trouble, for pages to show: several bugs, a storm, a paused queue, plans, and an operator at work."""

from typing import Any

from bartleby import Client, Failure
from tests.kit.clock import Clock

TRACE = """Traceback (most recent call last):
  File "/srv/shop/orders.py", line 88, in fulfil
    charge(order)
  File "/srv/shop/billing.py", line 41, in charge
    rate = RATES[order["currency"]]
  File "/usr/lib/python3/dist-packages/rates/table.py", line 12, in __getitem__
    return self._rows[name]
  File "/usr/lib/python3/dist-packages/rates/rows.py", line 7, in __getitem__
    raise KeyError(name)
KeyError: 'JPY\'"""

TIMEOUT = "no answer from payments.example.com:443 within 5 s"


def bury(
    client: Client, queue: str, payloads: list[object], *, kind: str, error: str, trace: str | None = TRACE,
    key: str | None = None, version: str = "2.4.0", retries: int = 0,
) -> list[int]:  # fmt: skip
    """Send messages and let them die of the same error, after some retries."""
    headers = {"tenant": "acme", "authorization": "Bearer x1"}
    sent = [
        int(client.send(queue, payload, headers=headers, key=None if key is None else f"{key}-{number}"))
        for number, payload in enumerate(payloads, 8800)
    ]
    same: dict[str, Any] = {
        "traceback": trace,
        "fingerprint": f"{queue} {kind} {error[:12]}",
        "worker_version": version,
    }
    retried: dict[str, Any] = {"verdict": "retry", "delay": 0.0, "rule": "retry: exponential"}
    dead: dict[str, Any] = {"verdict": "dead", "rule": "terminal: KeyError"}
    for attempt in range(retries + 1):
        text, ruling = (error, dead) if attempt == retries else ("connection reset by peer", retried)
        if lease := client.claim(queue, "worker-7.eu:4711", limit=500):
            failures = [Failure(each.position, kind, text, handler=queue, **same, **ruling) for each in lease]
            client.fail(lease.id, failures)
    return sent


def work(client: Client) -> None:
    for number, doing in enumerate(("orders", "billing")):
        client.report_worker(
            f"worker-{number}.eu", version="2.4.0", queues=[doing], host=f"node-{number}", pid=4711, concurrency=8,
            running=number,
        )  # fmt: skip


def remember(dsn: str, clock: Clock) -> None:
    """Let a day pass in which some messages die; then it is now."""
    day = {22: 2, 21: 1, 17: 1, 14: 3, 9: 1, 8: 2, 5: 6, 4: 9, 3: 14, 2: 21, 1: 33}
    clock.advance(-24 * 3600)
    with Client(dsn) as client:
        client.create_queue("billing")
        client.create_queue("mail")
        for before in range(23, 0, -1):
            clock.advance(3600)
            if count := day.get(before, 0):
                invoices: list[object] = [
                    {"invoice": 9000 + before * 50 + n, "gateway": "stripe"} for n in range(count)
                ]
                bury(client, "billing", invoices, kind="ConnectTimeout", error=TIMEOUT, trace=None, version="2.3.9")
            if before in {20, 11, 6}:
                users: list[object] = [{"to": f"user{before}@example.com"}]
                bury(client, "mail", users, kind="SMTPError", error="554 mailbox unavailable", trace=None)
    clock.advance(3600)


def furnish(client: Client) -> dict[str, int]:
    """Make a shop in trouble; return ids by what they are for."""
    for name in ("orders", "billing", "mail", "search.index"):
        client.create_queue(name)
    orders = [
        {
            "order": {"id": 12345678901234567890 + n, "currency": "JPY", "total": "1200.50"},
            "customer": {"id": 42 + n, "country": "JP", "card_number": "4111111111111111", "password": "hunter2"},
            "items": [{"sku": f"A-{n}", "count": 2}, {"sku": "B-7", "count": 1}],
        }
        for n in range(37)
    ]
    yen = bury(client, "orders", list(orders), kind="KeyError", error="'JPY'", key="order")
    bury(client, "billing", [{"invoice": n, "gateway": "stripe"} for n in range(124)], kind="ConnectTimeout",
         error=TIMEOUT, trace=None, key="invoice", version="2.3.9")  # fmt: skip
    mail = bury(client, "mail", [{"to": "ana@example.com"}], kind="ValueError", error="template 'welcome' has no body",
                retries=2)  # fmt: skip
    bury(client, "mail", [{"to": f"user{n}@example.com"} for n in range(6)], kind="UnicodeEncodeError",
         error="'latin-1' codec can't encode character '\u2019' in position 7", key="user")  # fmt: skip
    groups = {each.queue: int(each.id) for each in client.groups(limit=10)}
    by = {"actor": "ana", "reason": "a release without the new currencies"}
    client.acknowledge_group(groups["orders"], owner="ana", link="https://tickets.example.com/OPS-12", **by)
    client.pause_queue("search.index", actor="ben", reason="the index is rebuilt")
    client.force_breaker("billing", actor="ana", reason="the gateway is down")
    client.send_many("search.index", [{"payload": {"n": n}} for n in range(250)])
    client.discard(yen[:2], actor="ben", reason="test orders")
    client.hold([yen[2]], actor="ana", reason="evidence for the vendor")
    draft = client.plan_replay("queue:orders", actor="ana", reason="the rates are complete now", canary=10)
    patch = [{"op": "replace", "path": "/order/currency", "value": "EUR"}]
    edit = client.plan_replay(ids=yen[5:8], actor="ana", reason="sold in euro", patch=patch)
    client.put_sink("pager", "log", {}, actor="ana", reason="to hear of it")
    client.put_sink("chat", "log", {}, actor="ana", reason="for the others")
    client.report_sink("chat", failures=3, error="connect to chat.example.com:443: connection refused")
    stopped = client.plan_replay(ids=yen[20:24], actor="ben", reason="a first try")
    client.cancel_replay(stopped, actor="ben", reason="not fixed yet")
    work(client)
    client.add_token("token", "deploy", "0" * 64, role="operator", queues=["orders"], actor="ana", reason="releases")
    return {
        "letter": yen[10],
        "discarded": yen[0],
        "held": yen[2],
        "retried": mail[0],
        "group": groups["orders"],
        "draft": int(draft),
        "edit": int(edit),
        "stopped": int(stopped),
    }
