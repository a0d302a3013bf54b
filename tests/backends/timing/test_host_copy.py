from gpubench.backends.timing import copy_seconds


def test_every_copy_takes_some_time() -> None:
    seconds = copy_seconds(2**16, 5)
    assert len(seconds) == 5
    assert min(seconds) > 0
