"""For tests of replays: a shop whose bug can be fixed."""

import threading
from contextlib import AbstractContextManager

from bartleby import Bartleby, Client, Message, Replay
from tests.kit.worker import Running, present, until, working


class Shop:
    """A queue `orders`, where everything dies until `fixed` is set, and then only what has `poison` in it."""

    def __init__(self, app: Bartleby, client: Client) -> None:
        self.app = app
        self.client = client
        self.fixed = threading.Event()

        @app.handler("orders")
        async def fulfil(message: Message) -> None:
            if not self.fixed.is_set():
                raise KeyError("street")
            if isinstance(message.payload, dict) and message.payload.get("poison"):
                raise ValueError("poison")

        self.client.configure_queue("orders", {"max_attempts": 1, "breaker": "off"})

    def open(self) -> AbstractContextManager[Running]:
        return working(self.app)

    def plan(self, replay_id: int = 1) -> Replay:
        return present(self.client.find_replay(replay_id))


def wait_for(client: Client, replay_id: int, *statuses: str) -> Replay:
    """Wait until a plan has one of these statuses; return it."""

    def found() -> Replay | None:
        plan = present(client.find_replay(replay_id))
        return plan if plan.status in statuses else None

    return present(until(found, what=f"replay {replay_id} to be {statuses}"))
