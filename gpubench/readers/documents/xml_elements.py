"""The elements of an XML file, each with the line it stands on.

They are read with expat itself and not with a tree library, for two reasons: expat says on which line an element
stands, so that every message can, and its handlers refuse a document type before anything is declared in it. So no
entity is ever expanded or fetched, whatever the file holds.
"""

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from gpubench.errors import UsageError
from gpubench.readers.documents import limits

_EXPECTED = "NCCL's topology XML: <system> with <cpu>, <pci> and <gpu> in it"
_NEXT_STEP = "NCCL_TOPO_DUMP_FILE=topo.xml, set for any NCCL program, writes a whole one"
_DAMAGED = "the file was edited by hand, or is damaged"
_OTHER_ROOTS = {
    "graphs": "it is NCCL's graph dump (NCCL_GRAPH_DUMP_FILE): the rings and trees that NCCL chose, no topology",
    "topology": "it is hwloc's topology (lstopo), not NCCL's",
    "nvidia_smi_log": "it is the output of nvidia-smi -q -x",
}
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]{1,16}|\d{1,18})", re.ASCII)


@dataclass(slots=True)
class Element:
    """An element, where it stands, and what is in it."""

    file: str
    line: int
    tag: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list)

    def named(self, *tags: str) -> list["Element"]:
        """The elements in it that have one of these tags."""
        return [each for each in self.children if each.tag in tags]

    def text(self, attribute: str) -> str | None:
        """The text of an attribute; None where it is missing or empty."""
        return self.attributes.get(attribute, "").strip() or None

    def integer(self, attribute: str) -> int | None:
        """Decimal or, as NCCL allows, hexadecimal; None where it is missing or empty."""
        value = self.text(attribute)
        if value is None:
            return None
        if not _INTEGER.fullmatch(value):
            raise self.wrong(f"{attribute} is {value!r}", "a whole number")
        return int(value, 16 if "x" in value.lower() else 10)

    def wrong(self, seen: str, expected: str = _EXPECTED) -> UsageError:
        """The error about something in this element."""
        return _refused(self.file, self.line, f"<{self.tag}>: {seen}", _DAMAGED, expected)


def _refused(file: str, line: int, seen: str, reason: str, expected: str = _EXPECTED) -> UsageError:
    return UsageError(f"{file}, line {line}: {seen}", expected=expected, reason=reason, next_step=_NEXT_STEP)


class Parser:
    """Expat with every door closed: no document type, no entities, no deep nesting, at most so many elements."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._elements = 0
        self._open = [Element(name, 0, "", {})]
        self._expat = expat.ParserCreate("utf-8")
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = lambda _tag: self._open.pop()
        self._expat.StartDoctypeDeclHandler = self._refuse_doctype
        self._expat.EntityDeclHandler = self._refuse_doctype

    def root_of(self, text: str) -> Element:
        """The outermost element; UsageError, with its line, for broken XML, another program's, or entities."""
        document = self._open[0]
        try:
            self._expat.Parse(text.encode("utf-8", "surrogatepass"), True)  # noqa: FBT003
        except expat.ExpatError as error:
            what = expat.ErrorString(error.code)
            ends_early = what in (expat.errors.XML_ERROR_NO_ELEMENTS, expat.errors.XML_ERROR_UNCLOSED_TOKEN)
            reason = "the file was cut off" if ends_early else _DAMAGED
            what = f"the XML is broken at column {error.offset + 1}: {what}"
            raise _refused(self._name, error.lineno, what, reason) from None
        return document.children[0]

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        element = Element(self._name, self._expat.CurrentLineNumber, tag, attributes)
        if len(self._open) == 1 and tag != "system":
            reason = _OTHER_ROOTS.get(tag, "it is another program's XML")
            raise _refused(element.file, element.line, f"<{tag}> where <system> belongs", reason)
        if len(self._open) > limits.MOST_DEPTH:
            raise element.wrong(f"elements are nested more than {limits.MOST_DEPTH} deep")
        self._elements += 1
        if self._elements > limits.MOST_ELEMENTS:
            raise element.wrong(f"the file has more than {limits.MOST_ELEMENTS} elements")
        self._open[-1].children.append(element)
        self._open.append(element)

    def _refuse_doctype(self, root: str, *_declaration: object) -> None:
        reason = _OTHER_ROOTS.get(root, "it is another program's XML; NCCL declares nothing")
        raise _refused(self._name, self._expat.CurrentLineNumber, "a document type (<!DOCTYPE>)", reason)
