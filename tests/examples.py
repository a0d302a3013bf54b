"""How many examples of its inputs a property test tries: see `tests/conftest.py` for the profiles."""

from hypothesis import settings

USUAL = 25


def examples(usual: int) -> int:
    """What a test tries whose examples cost more, or less, than others': so many, in a search as many times more."""
    return usual * settings().max_examples // USUAL
