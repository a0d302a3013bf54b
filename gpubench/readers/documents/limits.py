"""The limits of what is read of any file that a person names: how long a pipe is waited for, how large JSON may be."""

SECONDS_WITHOUT_WRITER = 10.0
"""A pipe by name that no process has open for writing. A shell has the other end of `<(...)` open from the start."""

SECONDS_SILENT = 120.0
"""A pipe whose writer says nothing: nccl-tests takes some ten seconds to begin on a large machine, a minute a row."""

MOST_DEPTH = 64
"""Lists and objects of JSON inside each other, and elements of XML: gpubench writes 6, NCCL one a bridge."""

MOST_ELEMENTS = 2**16
"""Of XML: 128 GPUs with 36 NVLinks and 512 NICs make 6,000."""

MOST_DIGITS = 40
"""Of a whole number in JSON or CSV: 128 bits have fewer. Far longer ones have no float, and take the square of their
length to print."""

MOST_JSON_BYTES = 256 * 2**20
"""Of what a JSON text becomes in memory, by its brackets and commas: what -I of nccl-tests says of 64 processes, a
thousand times at 30 sizes, is 140 MB."""
