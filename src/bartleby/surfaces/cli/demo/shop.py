"""A shop whose handlers fail in telling ways. `bartleby demo` runs it as you would: bartleby work shop:app."""

import asyncio
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from bartleby import Bartleby, Message

app = Bartleby(version="1.0")


# A service that is flaky, and sometimes down. A ConnectionError is transient: the email is tried again, later and
# later. When nearly all of them fail, it is not the emails' fault: the breaker opens, and no attempts are burnt.
@app.handler("emails", retry={"max_attempts": 12, "backoff": "exponential", "base": 0.5, "cap": 3})
async def send_email(message: Message) -> None:
    """Hand an email to the mail server."""
    await mail_server(message.payload["to"])


# A bug. Nobody has told it that retrying is pointless, so it is retried once; then it is a dead letter. However many
# there are, with whatever ids in their texts: `bartleby groups` shows the two bugs that they are. The console says what
# the dead of one have in common. Mend it here, save, and the workers start again with it: then they can be replayed.
@app.handler("invoices", retry={"max_attempts": 2, "backoff": "fixed", "base": 0.5})
def write_invoice(message: Message) -> float:
    """Work out what one piece costs, with discount."""
    time.sleep(0.02)
    customer = message.payload["customer"]
    total, pieces = message.payload["total"], message.payload["pieces"]
    return float(total / pieces * (1 - DISCOUNTS[customer]))


@dataclass(frozen=True)
class Order:
    """What an order looks like."""

    id: int
    customer: str
    total: float


# A typed payload. What does not validate never gets here: it is dead at once, because trying again would not mend it,
# and the policy of the queue sends a copy to the queue orders.invalid.
@app.handler("orders")
async def accept_order(order: Order) -> None:
    """Take an order."""
    await asyncio.sleep(0.02)
    TURNOVER[order.customer] += order.total


# A process killer. No handler can catch this, and the other messages in that worker are not to blame. They all come
# back and run alone: what kills a worker while it is alone is the culprit, and after two such crashes a dead letter.
@app.handler("images", concurrency=4)
def resize_image(message: Message) -> None:
    """Make an image smaller."""
    time.sleep(0.1)
    if message.payload["name"] == "bomb.png":
        os.abort()


# The world outside.

DISCOUNTS = {f"customer-{number}": number % 10 / 100 for number in range(100)}
TURNOVER: dict[str, float] = defaultdict(float)
DICE = SystemRandom()
BAD_LUCK = 0.3


async def mail_server(recipient: str) -> None:
    """Take an email, or not."""
    await asyncio.sleep(DICE.uniform(0.01, 0.1))
    state = state_of_mail_server()
    if state == "down":
        raise ConnectionRefusedError("mail.example.com refused the connection")
    if state == "flaky" and DICE.random() < BAD_LUCK:
        raise ConnectionResetError(f"mail.example.com hung up on {recipient}")


def state_of_mail_server() -> str:
    """Return how the mail server is today: up, flaky or down."""
    return Path("mail-server").read_text(encoding="ascii")
