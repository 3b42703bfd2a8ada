"""The HTTP API, /api/v1: one file for each noun, over the desk of whoever asks."""

from bartleby.surfaces.web.api import groups, letters, office, queues, replays

routes = [route for part in (letters, groups, replays, queues, office) for route in part.router.routes]
