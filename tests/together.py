"""Cases of a test that are one test of pytest's, which takes milliseconds for each of its own."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

Test = Callable[..., None]


def together(names: str, cases: Iterable[Any], ids: Callable[[Any], object] = repr) -> Callable[[Test], Test]:
    """Try a test on all cases, as `parametrize` does, and fail once, with every case that failed and why.

    Cases share what fixtures give: it is for tests that leave nothing there. Of several names a case is a tuple.
    """
    words, known = [each.strip() for each in names.split(",")], list(cases)
    assert known, "no cases"

    def decorate(test: Test) -> Test:
        @wraps(test)
        def every_case(**fixtures: Any) -> None:
            failures = list[Exception]()
            for case in known:
                values = (case,) if len(words) == 1 else case
                try:
                    test(**dict(zip(words, values, strict=True)), **fixtures)
                except Exception as failure:  # noqa: BLE001 - all that can make a test fail
                    failure.add_note(f"of the case {ids(case)}")
                    failures.append(failure)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(known)} cases failed", failures)

        given = inspect.signature(test)
        assert set(words) <= set(given.parameters), "a name that the test does not take"
        left = [each for name, each in given.parameters.items() if name not in words]
        every_case.__signature__ = given.replace(parameters=left)  # type: ignore[attr-defined]
        return every_case

    return decorate
