"""JUnit XML for CI: a test case for every row that was judged, every finding, and the run itself.

FAIL is a failure, ERROR (could not be measured) an error; SKIP (not applicable, not judged) and INCONCLUSIVE are
skipped; a warning passes, with its words as the case's output.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpubench.formats.document import DocumentRun, documents
from gpubench.model.terms.verdict import Verdict

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from gpubench.model.results.judged_cases import JudgedCase


_NO_XML = "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
"""Characters that XML 1.0 cannot hold, not even escaped."""

_OUTCOMES = {
    Verdict.FAIL: "failure",
    Verdict.ERROR: "error",
    Verdict.SKIP: "skipped",
    Verdict.INCONCLUSIVE: "skipped",
    Verdict.WARN: "system-out",
}


def render(run: DocumentRun) -> Iterator[str]:
    """The document."""
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    from gpubench.model.results.judged_cases import cases

    metadata = run.metadata
    name = f"gpubench {metadata.subject}" + ("" if metadata.origin == "measured" else f" ({metadata.origin})")
    found = list(cases(metadata, run.rows, run.report))
    counts = {
        "tests": str(len(found)),
        "failures": str(sum(each.verdict is Verdict.FAIL for each in found)),
        "errors": str(sum(each.verdict is Verdict.ERROR for each in found)),
    }
    skipped = str(sum(_OUTCOMES.get(each.verdict) == "skipped" for each in found))
    suites = Element("testsuites", {"name": "gpubench", **counts})
    suite = SubElement(
        suites,
        "testsuite",
        {"name": name, **counts, "skipped": skipped, "timestamp": metadata.started_at[:19]}
        | {"hostname": ",".join(metadata.hosts[:1]), "time": "0"},
    )
    properties = SubElement(suite, "properties")
    for key, value in (
        ("version", metadata.gpubench_version),
        ("command", " ".join(metadata.command)),
        ("origin", metadata.origin),
        ("verdict", run.report.verdict.value),
        ("sentence", run.report.sentence),
    ):
        SubElement(properties, "property", {"name": key, "value": _legal(value)})
    for case in found:
        _add(suite, metadata.subject, case)
    indent(suites)
    # Characters beyond ASCII become references, so that no encoding of stdout can break the document.
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield tostring(suites, encoding="us-ascii", xml_declaration=False).decode("ascii") + "\n"


def _add(suite: "Element", subject: str, case: "JudgedCase") -> None:
    from xml.etree.ElementTree import SubElement

    attributes = {"classname": f"gpubench.{subject}.{case.group}", "name": _legal(case.name), "time": "0"}
    element = SubElement(suite, "testcase", attributes)
    kind = _OUTCOMES.get(case.verdict)
    if kind == "system-out":
        SubElement(element, kind).text = _legal(f"{case.verdict}: {case.text or case.name}")
    elif kind is not None:
        text = _legal(case.text or f"{case.verdict}: {case.name}")
        SubElement(element, kind, {"message": text.partition("\n")[0], "type": case.verdict.value}).text = text


def _legal(text: str) -> str:
    return re.sub(_NO_XML, "\ufffd", text)


writer = documents(render)
