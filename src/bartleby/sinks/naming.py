"""Names on the bus that depend on the event: "bartleby.{event}", "{queue}.dead"."""

import re
from dataclasses import dataclass
from typing import Self

from bartleby.sinks.alert import kind
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event

BY_EVENT = "bartleby.{event}"
"""The default where a bus routes by name: bartleby.dead_letter.created."""
_NOTHING = "-"
"""For {queue} in events that are about no queue."""
_PLACEHOLDER = re.compile(r"\{(event|type|queue)\}")


@dataclass(frozen=True, slots=True)
class Name:
    """A name in which {event} (group.opened), {type} (io.bartleby.group.opened) and {queue} may stand."""

    text: str

    @classmethod
    def option(cls, options: Options, name: str, default: str | None = None) -> Self:
        """Return an option that is such a name."""
        text = options.text(name, default)
        if re.search("[{}]", _PLACEHOLDER.sub("", text)):
            raise options.bad(name, "expected a name, in which only {event}, {type} and {queue} stand for something")
        return cls(text)

    def of(self, event: Event) -> str:
        """Return the name for an event."""
        said = {"event": kind(event), "type": str(event["type"])}
        said["queue"] = str(event.get("data", {}).get("queue") or _NOTHING)
        return _PLACEHOLDER.sub(lambda found: said[found[1]], self.text)

    def pattern(self) -> re.Pattern[str]:
        """Return what all names of this form match."""
        return re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(self.text)[::2])))
