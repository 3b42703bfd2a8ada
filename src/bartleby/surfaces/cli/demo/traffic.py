"""What the shop's customers send: mostly good, some of it telling."""

import contextlib
from collections import Counter
from random import SystemRandom
from typing import Any

from bartleby.client import Client
from bartleby.errors import UnknownQueue

QUEUES: dict[str, dict[str, Any]] = {
    # a short lease, so that a dead worker is noticed while you watch
    "emails": {"lease": 3},
    "images": {"lease": 2, "crash_budget": 2, "backoff": "none"},
    "invoices": {"lease": 3},
    "orders.invalid": {},
    "orders": {"lease": 3, "invalid_to": "orders.invalid"},
}
BOMB = {"name": "bomb.png"}
_LONGEST_TICK = 1.0
_BRANCHES = ("Lisbon", "Oslo", "Turin")
# those of a branch that has just opened: what is shared by the letters of this bug
_NEW_CUSTOMERS, _EMPTY_INVOICES, _WRONG_FORMS = 0.07, 0.04, 0.05


class Traffic:
    """Sends so many messages a second to each queue, and counts them."""

    def __init__(self, client: Client) -> None:
        self.sent: Counter[str] = Counter()
        self._client = client
        self._dice = SystemRandom()
        self._number = 0
        self._owed: Counter[str] = Counter()
        self._kinds = {
            "emails": (24, self._email),
            "images": (3, self._image),
            "invoices": (9, self._invoice),
            "orders": (10, self._order),
        }

    def send(self, seconds: float) -> None:
        """Send what is due after so many seconds more."""
        for queue, (rate, make) in self._kinds.items():
            self._owed[queue] += int(1000 * rate * min(seconds, _LONGEST_TICK))
            count, self._owed[queue] = divmod(self._owed[queue], 1000)
            if count:
                # whoever has the console may delete a queue
                with contextlib.suppress(UnknownQueue):
                    self._client.send_many(queue, [{"payload": make()} for _ in range(count)])
                    self.sent[queue] += count

    def send_bomb(self) -> int | None:
        """Send the image that kills whoever opens it, among others; return its id, unless there is no queue for it."""
        images = [{"payload": self._image()}, {"payload": BOMB}, {"payload": self._image()}]
        with contextlib.suppress(UnknownQueue):
            ids = self._client.send_many("images", images)
            self.sent["images"] += len(images)
            return ids[1]
        return None

    def _email(self) -> dict[str, Any]:
        return {"to": f"customer-{self._next()}@example.com", "subject": "Your order"}

    def _image(self) -> dict[str, Any]:
        return {"name": f"photo-{self._next()}.png"}

    def _invoice(self) -> dict[str, Any]:
        luck = self._dice.random()
        new = luck < _NEW_CUSTOMERS
        customer = self._dice.randrange(100, 10_000) if new else self._dice.randrange(100)
        branch = "Vienna" if new else self._dice.choice(_BRANCHES)
        pieces = 0 if luck > 1 - _EMPTY_INVOICES else self._dice.randrange(1, 20)
        return {"customer": f"customer-{customer}", "branch": branch, "pieces": pieces, "total": self._price()}

    def _order(self) -> dict[str, Any]:
        total: object = self._price()
        if self._dice.random() < _WRONG_FORMS:
            total = f"{total} EUR"
        return {"id": self._next(), "customer": f"customer-{self._dice.randrange(100)}", "total": total}

    def _price(self) -> float:
        return self._dice.randrange(100, 10_000) / 100

    def _next(self) -> int:
        self._number += 1
        return self._number
