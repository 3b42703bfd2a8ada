"""The pages of the console: one file for each."""

from bartleby.surfaces.web.live import router as live_router
from bartleby.surfaces.web.pages import assets
from bartleby.surfaces.web.pages.deeds import deed_pages
from bartleby.surfaces.web.pages.groups import group_pages
from bartleby.surfaces.web.pages.letter import letter_pages
from bartleby.surfaces.web.pages.letters import letter_lists
from bartleby.surfaces.web.pages.now import now_pages
from bartleby.surfaces.web.pages.office import office_pages
from bartleby.surfaces.web.pages.operations import plan_pages
from bartleby.surfaces.web.pages.queues import queue_pages
from bartleby.surfaces.web.pages.rendering import error_page, login_page
from bartleby.surfaces.web.pages.tokens import token_pages
from bartleby.surfaces.web.pages.words import filter_words

_parts = (
    assets.router,
    live_router,
    now_pages,
    group_pages,
    filter_words,
    letter_lists,
    deed_pages,
    letter_pages,
    plan_pages,
    queue_pages,
    office_pages,
    token_pages,
)
routes = [route for part in _parts for route in part.routes]

__all__ = ["error_page", "login_page", "routes"]
