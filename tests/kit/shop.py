"""A shop in trouble, for pages to show: several bugs, a storm, a paused queue, plans, and an operator at work."""

from typing import Any

from bartleby import Client, Failure

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


def die_in_shop(
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


def fill_shop(client: Client) -> dict[str, int]:
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
    yen = die_in_shop(client, "orders", list(orders), kind="KeyError", error="'JPY'", key="order")
    die_in_shop(client, "billing", [{"invoice": n, "gateway": "stripe"} for n in range(124)], kind="ConnectTimeout",
                error=TIMEOUT, trace=None, key="invoice", version="2.3.9")  # fmt: skip
    mail = die_in_shop(client, "mail", [{"to": "ana@example.com"}], kind="ValueError",
                       error="template 'welcome' has no body", retries=2)  # fmt: skip
    die_in_shop(client, "mail", [{"to": f"user{n}@example.com"} for n in range(6)], kind="UnicodeEncodeError",
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
