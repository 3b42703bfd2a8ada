"""What a tool says when it fails: what is wrong and what helps, in words that a model can act on."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import psycopg
from mcp.server.mcpserver.exceptions import ToolError

from bartleby.errors import BartlebyError, InvalidFilter, NoConnection, NotInstalled
from bartleby.surfaces.mcp.house import current
from bartleby.surfaces.mcp.untrusted import LONG, Quoting

_log = logging.getLogger("bartleby.mcp")
_AWAY = "the database cannot be reached; nothing was done: tell a person, and try again later"
_SLOW = "the database took too long and was stopped: narrow the filter down to a queue, a status or a time"
_REFUSED = "the database refused; nothing was done: tell a person to look at the log of this server"


def answering(tool: Callable[..., Any], quoting: Quoting) -> Callable[..., Any]:
    """Return a tool whose errors are sentences, and known to the audit by their class."""

    @functools.wraps(tool)
    def answer(**arguments: Any) -> Any:  # noqa: ANN401 - whatever the tool takes and answers
        try:
            return tool(**arguments)
        except (BartlebyError, psycopg.Error) as error:
            current().problem = type(error).__name__
            raise ToolError(_sentence(error, arguments.get("filter"), quoting)) from None

    return answer


def _sentence(error: Exception, filter: object, quoting: Quoting) -> str:
    match error:
        case InvalidFilter() if isinstance(filter, str):
            parts = [str(error), error.pointed(filter), f"hint: {error.hint}" if error.hint else ""]
        case NoConnection() | NotInstalled():
            _log.warning("%s", error)
            parts = [_AWAY]
        case BartlebyError():
            parts = [str(error), f"hint: {error.hint}" if error.hint else ""]
        case psycopg.errors.QueryCanceled():
            parts = [_SLOW]
        case psycopg.OperationalError() | psycopg.InterfaceError():
            _log.warning("%s", error)
            parts = [_AWAY]
        case _:
            _log.error("%s", error)
            parts = [_REFUSED]
    return quoting.clean("\n".join(each for each in parts if each))[: 2 * LONG]
