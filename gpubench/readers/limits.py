"""Limits on what is read from any file, by kind."""

# Any file.
SECONDS_WITHOUT_WRITER = 10.0
"""Wait for a process to open a named pipe for writing. For `<(...)` a shell has it open from the start."""

SECONDS_SILENT = 120.0
"""Wait for a pipe whose writer sends nothing: nccl-tests takes ten seconds to start on a large machine, and a
minute per row.
"""

MOST_DEPTH = 64
"""Nesting of JSON lists and objects, and of XML elements: gpubench writes 6, NCCL one per bridge."""

MOST_ELEMENTS = 2**16
"""XML elements: 128 GPUs with 36 NVLinks and 512 NICs make 6,000."""

MOST_DIGITS = 40
"""Digits of a whole number in JSON or CSV: 128 bits need fewer. Much longer numbers have no float, and printing
them takes quadratic time.
"""

MOST_JSON_BYTES = 256 * 2**20
"""Memory of a JSON text, estimated from its brackets and commas: nccl-tests with -I, 64 processes, 1,000 iterations
and 30 sizes takes 140 MB.
"""


# Machines.
MOST_MACHINE_BYTES = 4 * 2**20
"""A file of `--from`, far more than a node needs: nvidia-smi -q of eight GPUs is below 1 MiB."""

MOST_GPUS, MOST_NICS, MOST_SWITCHES = 128, 512, 1024
"""Devices of a node in a file, several times those of the largest machines. More pairs would take hours."""

MOST_SWITCHES_ABOVE = 64
"""Switches above one device."""

MOST_PCI_DEVICES, MOST_BRIDGES_ABOVE = 4096, 64
"""PCI devices of a node, and bridges above one device."""

MOST_MACHINE_PAIRS = 2**17
"""Device pairs of a node in a snapshot: 128 GPUs and 200 NICs have as many."""

LONGEST_LINE = 8192
"""Characters of a line of nvidia-smi: a row of 16 GPUs and 32 NICs has about 400."""

MOST_NODES = 4096
"""Nodes of a recording: 32,768 ranks on nodes of eight, a minute of reading."""

MOST_NODE_BYTES = 16 * 2**20
"""Bytes of one node's file: 64 GPUs with 1,000 PCI devices take 2 MiB."""

MOST_NODES_BYTES = 256 * 2**20
"""Bytes of all node files: 3,800 nodes of eight GPUs and eight NICs, which take 1 GB in memory."""

MOST_RANKS_BYTES, MOST_RECORDED_RANKS = 128 * 2**20, 2**16
"""Bytes and lines of `ranks.jsonl`: the facts of 30,000 ranks."""

MOST_SAMPLES_BYTES, MOST_SAMPLES = 2**30, 2**19
"""Bytes and lines of a sample file: arrival times of 30,000 ranks at 50 rows."""


# Results.
MOST_RESULT_BYTES = 128 * 2**20
"""Bytes of a result. nccl-tests' JSON with -I has every iteration of every process: 1,000 of 1,024 processes at 30
sizes are 500 MB, those of 64 processes 30 MB. gpubench's of 4,096 ranks are 1 MB.
"""

MOST_CELLS = 2**23
"""Cells of a CSV: 2**17 rows of 64 columns."""

MOST_COLUMNS = 256
"""Columns of a CSV: a row of a collective has 50."""

MOST_RESULT_LINES = 2**20
"""Lines of a text of nccl-tests or OSU, including NCCL's lines: 1,024 ranks log 1,000 each."""

MOST_ROWS = 2**19
"""Rows of a file, including pairs: 724 ranks have as many ordered pairs. A check of 1,024 nodes with eight GPUs has
377,000 rows.
"""

MOST_ALIKE = 2**21
"""Rows of all sections in a JSON document that writes equal nodes once: topo of 2,048 nodes with eight GPUs has
850,000.
"""

MOST_RESULT_RANKS = 2**20
"""Ranks of an nccl-tests run, as its text claims."""


# Logs.
MOST_LOG_FILES = 2**16
"""One file per rank and communicator of the largest jobs. Beyond the limit, the first files by name are read."""

MOST_LOG_BYTES, MOST_LOG_LINES = 2**36, 2**30
"""Bytes and lines of unpacked text: ten minutes of reading (`benchmarks/explain_speed.py`)."""

MOST_LOG_SECONDS = 600.0
"""Seconds of reading, because short lines cost as much as long ones."""

MOST_BYTES_WITHOUT_LINE_END = 2**26
"""NCCL formats a line in 1,024 bytes. 64 MiB without a line end are no log, but /dev/zero, or zeros in a gzip."""

MOST_DUMP_BYTES = 2**26
"""Bytes that one rank recorded: 2,000 calls with their frames take 4 MB."""

MOST_INSPECTED = 2**21
"""Lines of NCCL's Inspector, one operation of one rank each: 0.5 GB of JSON, and as much in memory."""

MOST_LOG_RANKS = 2**18
"""Ranks of a communicator. The largest known clusters have about 100,000 GPUs."""

MOST_PLACES = 2**20
"""Ranks of all communicators that the log claims: 16,384 ranks in 16 communicators each are a quarter."""

MOST_COMMUNICATORS = 2**16
"""Communicators with different ids."""

MOST_WITHOUT_ID = 2**11
"""Communicators without ids (NCCL before 2.17, logs without init). They are matched pairwise, which takes n² steps."""

MOST_COMMS = 2**18
"""Ranks of communicators with a log: 16,384 ranks in 16 communicators each."""

MOST_COMMS_OF_A_PROCESS = 2**13
"""Communicators of a process. Every unknown line is compared with all of them."""

MOST_PROCESSES = 2**17
"""A quarter more than the largest clusters have GPUs."""

MOST_THREADS_OF_A_PROCESS = 2**12
"""Threads of a process. Their state is reset whenever a communicator is created."""

MOST_LOG_PAIRS = 2**23
"""Pairs of a rank and a peer, from both ends: 2,048 fully connected ranks, in 400 MB."""

MOST_AMBIGUOUS = 2**20
"""Channels that may belong to several communicators of a process, counted once for each: 64 to each of 1,000 ranks
in three communicators are a fifth.
"""

MOST_EARLY_OF_A_THREAD = 2**13
"""Ranks whose connections a thread logs before it names a communicator. A log without hosts has all in a few
threads.
"""

MOST_SETTINGS, MOST_REMARKS, MOST_WARNINGS = 2**14, 2**14, 2**8
"""Distinct lines. A job of thousands of ranks has fewer. More are counted, and reading continues."""

MOST_TELLERS = 2**21
"""Settings, remarks and warnings times the processes that log them: 30 for each of 65,536 ranks."""
