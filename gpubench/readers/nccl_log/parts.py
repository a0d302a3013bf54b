"""Split pasted text into RAS responses, stacks, JSON from NCCL's Inspector, commands and logs, and parse each part."""

from typing import TYPE_CHECKING

from gpubench.readers import limits, pasted
from gpubench.readers.hangs import RasText, is_ras_answer, read_ras_answer, read_stack
from gpubench.readers.results.nccl_inspector import Header

if TYPE_CHECKING:
    from gpubench.readers.nccl_log.stream import NcclLogReader

_LONG_BLOCK_BYTES = 2**18  # A block shorter than this is the last one of its stream.


class PastedParts:
    """Parses the parts of one stream block by block. `name` is the name of the file."""

    def __init__(self, reader: "NcclLogReader", name: str) -> None:
        self._reader, self._name = reader, name
        self._open = b""
        """The last part of the previous block, if the next block may continue it."""

        self._answer: RasText | None = None
        self._header = Header()

    def add(self, block: bytes) -> None:
        """Parse a block that consists of complete lines."""
        if not (self._open or pasted.may_hold_parts(block)):
            self._reader.read_lines(block)
            return
        parts = list(pasted.split(_lines(self._open + block)))
        self._open = b""
        for place, part in enumerate(parts, 1):
            if place == len(parts) and part.kind is not pasted.Kind.OUTPUT and len(block) >= _LONG_BLOCK_BYTES:
                self._open = _bytes(part)
            else:
                self._read(part)
        if len(self._open) > limits.MOST_DUMP_BYTES:
            self._reader.reached.pass_over("a part without an end", f"{limits.MOST_DUMP_BYTES} bytes of one part")
            self._open = b""

    def end(self, rest: bytes) -> None:
        """Parse `rest`, the end of the stream after the last line end."""
        parts = list(pasted.split(_lines(self._open + rest)))
        is_cut = bool(rest and parts and parts[-1].kind is pasted.Kind.OUTPUT)
        if is_cut:
            parts[-1].lines.pop()
        for part in parts:
            self._read(part)
        if is_cut:
            self._reader.read_cut_line(rest)
        self._end_answer()

    def _read(self, part: pasted.PastedPart) -> None:
        kind = part.kind
        if kind is pasted.Kind.OUTPUT:
            self._reader.read_lines(_bytes(part))
            return
        self._reader.count_others(len(part.lines))
        if kind is pasted.Kind.RAS:
            if self._answer is None or pasted.begins_ras_answer(part.lines[0]):
                self._end_answer()
                self._answer = RasText()
            # Output of other programs may be mixed into the lines of a response.
            for line in part.lines:
                self._answer.add(line.strip())
        elif kind is pasted.Kind.STACK:
            self._reader.stacks.append(read_stack(_bytes(part), self._name))
        elif kind is pasted.Kind.JSON:
            text = part.text.strip().strip("[],").strip()
            if is_ras_answer(text.encode()):
                self._reader.ras.extend(read_ras_answer(text.encode(), self._name))
            elif text:
                self._reader.inspector.add(text, self._header)
        elif kind is pasted.Kind.COMMAND:
            self._reader.add_command(part.text)

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._reader.ras.extend(self._answer.communicators)
        self._answer = None


def _lines(block: bytes) -> list[str]:
    lines = block.decode("utf-8", "surrogateescape").split("\n")
    return lines if lines[-1] else lines[:-1]


def _bytes(part: pasted.PastedPart) -> bytes:
    return part.text.encode("utf-8", "surrogateescape")
