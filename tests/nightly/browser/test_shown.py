"""The documentation of the console names the tests that show it."""

from tools.drills import PAGE, shown, shown_table, written
from tools.shots import KEPT, TOUR, WAYS


def test_each_interaction_and_drill_is_shown_by_a_test() -> None:
    wanted = {f"Interaction {number}" for number in range(1, 11)} | {f"Drill {letter}" for letter in "abcdefgh"}
    assert {what for what, _, _ in shown()} == wanted


def test_page_of_the_drills_names_its_tests() -> None:
    page = PAGE.read_text()
    assert written(page, "tests", shown_table()) == page, "python -m tools.drills --tests"


def test_tour_has_every_page_in_light_dark_and_on_a_phone() -> None:
    tour = (PAGE.parent / "console-tour.md").read_text()
    for name in (f"{page}-{way}.png" for page in TOUR for way in WAYS):
        assert (KEPT / name).exists(), name
        assert f"../images/console/{name}" in tour, name
