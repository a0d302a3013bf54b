"""The limits of what is read of results."""

MOST_BYTES = 128 * 2**20
"""Of a file: nccl-tests' JSON with -I holds every iteration of every process: 1,000 of 1,024 at 30 sizes are 500 MB,
which nobody compares; 64 processes' are 30 MB. gpubench's of 4,096 ranks are 1 MB."""

MOST_CELLS = 2**23
"""Of a CSV: 2**17 rows of 64 columns."""

MOST_COLUMNS = 256
"""Of a CSV: a row of a collective has 50."""

MOST_LINES = 2**20
"""Of a text of nccl-tests or OSU, NCCL's lines among them included: 1,024 ranks log 1,000 each."""

MOST_ROWS = 2**19
"""Of a file, of its pairs too: every ordered pair of 724 ranks; a check of 1,024 nodes with eight GPUs has 377,000."""

MOST_ALIKE = 2**21
"""Of all sections of a JSON document whose rows of nodes that are alike are written once, and which is short for what
it makes: topo of 2,048 nodes with eight GPUs has 850,000."""

MOST_RANKS = 2**20
"""Of a run of nccl-tests, as its text says."""
