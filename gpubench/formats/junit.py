"""JUnit XML for CI: one test case per judged row, one per finding, and one for the run. Failures come first.

FAIL becomes a failure and ERROR (could not be measured) an error. SKIP (not applicable or not judged) and INCONCLUSIVE
become skipped. WARN passes, with its text in system-out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubench.formats.json import DocumentRun, documents
from gpubench.model.terms.units import printable_line
from gpubench.model.terms.verdict import Verdict

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_OUTCOMES = {
    Verdict.FAIL: "failure",
    Verdict.ERROR: "error",
    Verdict.SKIP: "skipped",
    Verdict.INCONCLUSIVE: "skipped",
    Verdict.WARN: "system-out",
}


def render(run: DocumentRun) -> Iterator[str]:
    from xml.etree.ElementTree import indent, tostring

    from gpubench.model.results.sentence import cases

    metadata = run.metadata
    name = f"gpubench {metadata.subject}" + ("" if metadata.origin == "measured" else f" ({metadata.origin})")
    found = list(cases(metadata, run.rows, run.report))
    counts = {
        "tests": str(len(found)),
        "failures": str(sum(case.verdict is Verdict.FAIL for case in found)),
        "errors": str(sum(case.verdict is Verdict.ERROR for case in found)),
    }
    skipped = str(sum(_OUTCOMES.get(case.verdict) == "skipped" for case in found))
    suites = _element(None, "testsuites", {"name": "gpubench", **counts})
    suite = _element(
        suites,
        "testsuite",
        {"name": name, **counts, "skipped": skipped, "timestamp": metadata.started_at[:19]}
        | {"hostname": ",".join(metadata.hosts[:1]), "time": "0"},
    )
    properties = _element(suite, "properties", {})
    for key, value in (
        ("version", metadata.gpubench_version),
        ("command", " ".join(metadata.command)),
        ("origin", metadata.origin),
        ("verdict", run.report.verdict.value),
        ("sentence", run.report.sentence),
    ):
        _element(properties, "property", {"name": key, "value": value})
    for case in found:
        attributes = {"classname": f"gpubench.{metadata.subject}.{case.group}", "name": case.name, "time": "0"}
        element = _element(suite, "testcase", attributes)
        kind = _OUTCOMES.get(case.verdict)
        if kind == "system-out":
            first, *others = case.lines or (case.name,)
            _element(element, kind, {}, (f"{case.verdict}: {first}", *others))
        elif kind is not None:
            lines = case.lines or (f"{case.verdict}: {case.name}",)
            _element(element, kind, {"message": lines[0], "type": case.verdict.value}, lines)
    indent(suites)
    # Write characters beyond ASCII as references, so that the document is valid in any encoding of stdout.
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield tostring(suites, encoding="us-ascii", xml_declaration=False).decode("ascii") + "\n"


def _element(parent: "Element | None", tag: str, attributes: Mapping[str, str], lines: Sequence[str] = ()) -> "Element":
    """Add an element. All text goes through this function, because XML forbids control characters, even escaped."""
    from xml.etree.ElementTree import Element, SubElement

    shown = {name: printable_line(value) for name, value in attributes.items()}
    element = Element(tag, shown) if parent is None else SubElement(parent, tag, shown)
    element.text = "\n".join(map(printable_line, lines)) or None
    return element


writer = documents(render)
