"""The words of one collective operation: type, reduction, placement, and the element counts of its buffers."""

import re
from dataclasses import dataclass
from enum import StrEnum


class NumberKind(StrEnum):
    """The interpretation of an element's bits."""

    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"


class DataType(StrEnum):
    """Element types, by NCCL's names."""

    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def size_bytes(self) -> int:
        """Bytes an element takes."""
        return int(re.sub(r"\D", "", self.value)) // 8

    @property
    def kind(self) -> NumberKind:
        """Signed or unsigned integer, or floating point."""
        if self in (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64):
            return NumberKind.FLOAT
        return NumberKind.UNSIGNED if self is DataType.UINT8 else NumberKind.SIGNED


class ReduceOp(StrEnum):
    """Reductions, by NCCL's names."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AVG = "avg"


class Placement(StrEnum):
    """The buffer of the result: one of its own, or the input's, as NCCL lays it out."""

    OUT_OF_PLACE = "out_of_place"
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class Layout:
    """Element counts of one operation on one rank.

    `count` is the number handed to the library, `send` and `receive` are the elements of each buffer. For an in-place
    operation rank r sends from `r × in_place_send` and receives at `r × in_place_receive` of the one buffer.
    """

    count: int
    send: int
    receive: int
    in_place_send: int = 0
    in_place_receive: int = 0

    @property
    def largest(self) -> int:
        """Elements of the larger buffer: what nccl-tests prints as size, and the distance between rotated buffers."""
        return max(self.send, self.receive)


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements that a part of a receive buffer must hold after the operation.

    Elements `[offset, offset + count)` equal elements `[start, start + count)` of what rank `source` sent, or, where
    `source` is None, of the reduction over all ranks.
    """

    offset: int
    count: int
    start: int
    source: int | None = None
