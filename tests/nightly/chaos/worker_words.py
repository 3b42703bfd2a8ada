"""The names that the chaos application and its judges share."""

SWIFT, SLOW = "swift", "slow"
"""Coroutines, and functions in threads."""
ABORT, OUTAGE, VENOM, ORDERS, BUGS, ONCE, NOTHING = (
    "abort", "outage", "venom", "orders", "bugs", "once", "nothing",
)  # fmt: skip
EFFECTS = "public.effects"
