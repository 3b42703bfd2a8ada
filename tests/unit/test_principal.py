"""Who may do what, and a filter that cannot be widened."""

import itertools

import pytest

from bartleby.errors import Forbidden
from bartleby.principal import Permission, Principal, Role

ROLES = {
    Role.READER: {"read"},
    Role.AGENT: {"read", "propose"},
    Role.OPERATOR: {"read", "reveal", "propose", "replay", "approve", "discard", "triage", "steer", "send"},
    Role.ADMIN: {str(each) for each in Permission},
}


@pytest.mark.parametrize("role", Role)
def test_a_role_has_its_permissions_and_no_other(role: Role) -> None:
    principal = Principal("ana", role)
    assert {str(each) for each in Permission if principal.may(each)} == ROLES[role]


def test_each_role_may_do_what_the_one_before_may() -> None:
    roles = list(Role)
    for less, more in itertools.pairwise(roles):
        assert less.permissions < more.permissions


@pytest.mark.parametrize(
    ("permission", "least"),
    [(Permission.PROPOSE, "agent"), (Permission.DISCARD, "operator"), (Permission.ADMIN, "admin")],
)
def test_a_refusal_says_who_may(permission: Permission, least: str) -> None:
    with pytest.raises(Forbidden, match=f"eva is reader here, and may not {permission}") as refused:
        Principal("eva", Role.READER).require(permission)
    assert refused.value.hint == f"{least} may"


def test_what_is_about_all_queues_is_for_whoever_has_them_all() -> None:
    Principal("ana", Role.READER).require_all_queues()
    with pytest.raises(Forbidden, match="eva is held to a, b"):
        Principal("eva", Role.ADMIN, frozenset({"b", "a"})).require_all_queues()


def test_whoever_is_held_sees_their_queues_and_nothing_without_one() -> None:
    held, free = Principal("eva", Role.READER, frozenset({"a"})), Principal("ana", Role.READER)
    assert [held.sees(each) for each in ("a", "b", None)] == [True, False, False]
    assert [free.sees(each) for each in ("a", "b", None)] == [True, True, True]


@pytest.mark.parametrize(
    ("queues", "filter", "narrow"),
    [
        (None, "type:KeyError", "type:KeyError"),
        ({"a"}, "", "queue:a"),
        ({"b", "a"}, "queue:c", "queue:a,b queue:c"),
        ({"a,b"}, "x", 'queue:"a,b" x'),
        ({"a*"}, "x", 'queue:"a*" x'),
        (set(), "queue:a", "id:1 -id:1 queue:a"),
    ],
)
def test_a_filter_is_narrowed_by_a_term_in_front_of_it(queues: set[str] | None, filter: str, narrow: str) -> None:
    principal = Principal("eva", Role.READER, None if queues is None else frozenset(queues))
    assert principal.narrowed(filter) == narrow
