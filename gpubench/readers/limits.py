"""The limits of what is read of any file, by kind."""

# Of any file.
SECONDS_WITHOUT_WRITER = 10.0
"""A named pipe that no process has open for writing. A shell has the other end of `<(...)` open from the start."""

SECONDS_SILENT = 120.0
"""A pipe whose writer sends nothing: nccl-tests takes about ten seconds to begin on a large machine, a minute per
row."""

MOST_DEPTH = 64
"""Nested lists and objects of JSON, and elements of XML: gpubench writes 6, NCCL one per bridge."""

MOST_ELEMENTS = 2**16
"""Of XML: 128 GPUs with 36 NVLinks and 512 NICs make 6,000."""

MOST_DIGITS = 40
"""Of a whole number in JSON or CSV: 128 bits have fewer. Much longer ones have no float, and printing takes the
square of their length."""

MOST_JSON_BYTES = 256 * 2**20
"""Of a JSON text in memory, estimated by its brackets and commas: -I of nccl-tests with 64 processes, a thousand
times at 30 sizes, is 140 MB."""


# Of machines.
MOST_MACHINE_BYTES = 4 * 2**20
"""Of a file of `--from`, far more than the description of a node takes: nvidia-smi -q of eight GPUs is below 1
MiB."""

MOST_GPUS, MOST_NICS, MOST_SWITCHES = 128, 512, 1024
"""Of a node in a file: several times what the largest machines have. With more, its pairs would take hours."""

MOST_SWITCHES_ABOVE = 64
"""Of one device."""

MOST_PCI_DEVICES, MOST_BRIDGES_ABOVE = 4096, 64
"""Of a node, and of one device."""

MOST_MACHINE_PAIRS = 2**17
"""Of devices of a node in a snapshot: 128 GPUs and 200 NICs have as many."""

LONGEST_LINE = 8192
"""Characters of a line of nvidia-smi: a row of 16 GPUs and 32 NICs takes some 400."""

MOST_NODES = 4096
"""Of a recording: 32,768 ranks in nodes of eight, a minute of reading."""

MOST_NODE_BYTES = 16 * 2**20
"""Of one node's file: 64 GPUs with 1,000 PCI devices take 2 MiB."""

MOST_NODES_BYTES = 256 * 2**20
"""Of all nodes' files together: 3,800 nodes of eight GPUs and eight NICs, which are 1 GB in memory."""

MOST_RANKS_BYTES, MOST_RECORDED_RANKS = 128 * 2**20, 2**16
"""Of `ranks.jsonl`, and its lines: the facts of thirty thousand ranks."""

MOST_SAMPLES_BYTES, MOST_SAMPLES = 2**30, 2**19
"""Of a file of samples, and its lines: thirty thousand ranks that say when they came to fifty rows."""


# Of results.
MOST_RESULT_BYTES = 128 * 2**20
"""Of a file: nccl-tests' JSON with -I holds every iteration of every process: 1,000 of 1,024 processes at 30 sizes
are 500 MB; 64 processes' are 30 MB. gpubench's of 4,096 ranks are 1 MB."""

MOST_CELLS = 2**23
"""Of a CSV: 2**17 rows of 64 columns."""

MOST_COLUMNS = 256
"""Of a CSV: a row of a collective has 50."""

MOST_RESULT_LINES = 2**20
"""Of a text of nccl-tests or OSU, NCCL's lines among them included: 1,024 ranks log 1,000 each."""

MOST_ROWS = 2**19
"""Of a file, of its pairs too: every ordered pair of 724 ranks; a check of 1,024 nodes with eight GPUs has
377,000."""

MOST_ALIKE = 2**21
"""Rows of all sections of a JSON document that writes equal nodes once: topo of 2,048 nodes with eight GPUs has
850,000."""

MOST_RESULT_RANKS = 2**20
"""Of a run of nccl-tests, as its text says."""


# Of logs.
MOST_LOG_FILES = 2**16
"""A file a rank and communicator of the largest jobs; beyond, the first by name are read."""

MOST_LOG_BYTES, MOST_LOG_LINES = 2**36, 2**30
"""Of text, unpacked: ten minutes of reading, by `benchmarks/explain_speed.py`."""

MOST_LOG_SECONDS = 600.0
"""Of reading, for short lines cost as much as long ones."""

MOST_BYTES_WITHOUT_LINE_END = 2**26
"""NCCL formats a line in 1,024 bytes. 64 MiB without a line end are not a log: /dev/zero, or zeros in a gzip."""

MOST_DUMP_BYTES = 2**26
"""Of what one rank recorded: 2,000 calls with their frames take four megabytes."""

MOST_INSPECTED = 2**21
"""Lines of NCCL's Inspector, one operation of one rank each: half a gigabyte of JSON, and as much in memory."""

MOST_LOG_RANKS = 2**18
"""Of a communicator; the largest clusters known have some 100,000 GPUs."""

MOST_PLACES = 2**20
"""Ranks of all communicators together, according to the log: 16,384 ranks in 16 communicators each are a quarter."""

MOST_COMMUNICATORS = 2**16
"""Different ones, by their ids."""

MOST_WITHOUT_ID = 2**11
"""Communicators of NCCL before 2.17, and of logs without init, which are told apart by trying: n² times."""

MOST_COMMS = 2**18
"""Ranks of communicators with a log: 16,384 ranks in 16 communicators each."""

MOST_COMMS_OF_A_PROCESS = 2**13
"""Every unknown line is compared with all of them."""

MOST_PROCESSES = 2**17
"""A quarter more than the largest clusters have GPUs."""

MOST_THREADS_OF_A_PROCESS = 2**12
"""Their state is reset whenever a communicator begins."""

MOST_LOG_PAIRS = 2**23
"""Of a rank and its peer, from both ends: 2,048 ranks, all connected with all, in 400 MB."""

MOST_AMBIGUOUS = 2**20
"""Channels that may belong to several communicators of a process, once for each: 64 to each of 1,000 ranks in three
are a fifth."""

MOST_EARLY_OF_A_THREAD = 2**13
"""Ranks whose connections a thread logs before it names a communicator: a log without hosts has all in a few."""

MOST_SETTINGS, MOST_REMARKS, MOST_WARNINGS = 2**14, 2**14, 2**8
"""Different ones; a job of thousands of ranks has fewer. More are counted, and reading continues."""

MOST_TELLERS = 2**21
"""Settings, remarks and warnings times the processes that log them: 30 for each of 65,536 ranks."""
