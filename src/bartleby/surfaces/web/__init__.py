"""The console and the HTTP API, as one ASGI application.

    from bartleby.surfaces.web import console
    app.mount("/bartleby", console())           # in a FastAPI or Starlette application

`bartleby console` runs it by itself.
"""

from bartleby.surfaces.web.app import console
from bartleby.surfaces.web.settings import ConsoleSettings, ProxySettings

__all__ = ["ConsoleSettings", "ProxySettings", "console"]
