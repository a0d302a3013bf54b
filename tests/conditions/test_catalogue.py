"""The catalogue as people read it: ids, words, links."""

import re

import pytest

from gpubench.conditions import CAUSES, Cause

_LINK = re.compile(
    r"https://(github\.com/[\w.-]+/[\w.-]+(/(issues|pull)/\d+)?"
    r"|docs\.nvidia\.com/[\w./-]+\.html(#[\w-]+)?"
    r"|www\.open-mpi\.org/faq/\?category=runcuda)"
)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.id)
def test_an_entry_is_whole(cause: Cause) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cause.id)
    assert all((cause.title, cause.effects, cause.detection, cause.settles, cause.cure))
    assert _LINK.fullmatch(cause.link), cause.link
    assert all(word and "`" not in word for word in cause.seen_as)


def test_ids_are_stable_names_and_what_is_implied_exists() -> None:
    ids = [cause.id for cause in CAUSES]
    assert len(ids) == len(set(ids)) >= 40
    assert {name for cause in CAUSES for name in cause.implies} <= set(ids)
