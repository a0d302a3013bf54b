"""Limits for reading files, by kind of file. docs/reference/security.md lists them."""

# Any file.
SECONDS_WITHOUT_WRITER = 10.0
"""Time to wait until a process opens a named pipe for writing. For `<(...)`, the shell has already opened the pipe."""

SECONDS_SILENT = 120.0
"""Time to wait for a pipe whose writer sends nothing. On a large machine, nccl-tests takes ten seconds to start and
a minute per row.
"""

MOST_DEPTH = 64
"""Nesting depth of JSON and XML. gpubench writes 6 levels, and NCCL writes one level per PCI bridge."""

MOST_ELEMENTS = 2**16
"""Elements in an XML file. 128 GPUs with 36 NVLinks each and 512 NICs need 6,000."""

MOST_DIGITS = 40
"""Digits of an integer in JSON or CSV. A 128-bit integer has at most 39. Much longer integers do not fit a float, and
printing them takes quadratic time.
"""

MOST_JSON_BYTES = 256 * 2**20
"""Memory for the values in a JSON text, estimated from its brackets and commas. The JSON of nccl-tests with -I
takes 140 MB for 64 processes, 1,000 iterations and 30 sizes.
"""


# Machines.
MOST_MACHINE_BYTES = 4 * 2**20
"""Size of a file for `--from`. The output of nvidia-smi -q for eight GPUs is smaller than 1 MiB."""

MOST_GPUS, MOST_NICS, MOST_SWITCHES = 128, 512, 1024
"""Devices of a node, several times as many as in the largest machines. With more devices, checking all pairs would
take hours.
"""

MOST_SWITCHES_ABOVE = 64
"""PCIe switches above one device."""

MOST_PCI_DEVICES, MOST_BRIDGES_ABOVE = 4096, 64
"""PCI devices of a node, and PCI bridges above one device."""

MOST_MACHINE_PAIRS = 2**17
"""Device pairs of a node in a snapshot. 128 GPUs and 200 NICs have about as many."""

LONGEST_LINE = 8192
"""Characters per line in nvidia-smi's output. The matrix row for 16 GPUs and 32 NICs has about 400."""

MOST_NODES = 4096
"""Nodes in a recording. With eight GPUs per node they have 32,768 ranks, and reading them takes a minute."""

MOST_NODE_BYTES = 16 * 2**20
"""Size of the file of one node in a recording. A node with 64 GPUs and 1,000 PCI devices takes 2 MiB."""

MOST_NODES_BYTES = 256 * 2**20
"""Size of all node files in a recording, enough for 3,800 nodes with eight GPUs and eight NICs each. Reading them
takes 1 GB of memory.
"""

MOST_RANKS_BYTES, MOST_RECORDED_RANKS = 128 * 2**20, 2**16
"""Size and lines of `ranks.jsonl`, enough for the facts of 30,000 ranks."""

MOST_SAMPLES_BYTES, MOST_SAMPLES = 2**30, 2**19
"""Size and lines of a file with samples, enough for the arrival times of 30,000 ranks in 50 rows."""


# Results.
MOST_RESULT_BYTES = 128 * 2**20
"""Size of a result file. With -I, nccl-tests' JSON has every iteration of every process. For 1,000 iterations and
30 sizes, 64 processes write 30 MB, and 1,024 processes write 500 MB. gpubench writes 1 MB for 4,096 ranks.
"""

MOST_CELLS = 2**23
"""Cells in a CSV file, enough for 2**17 rows with 64 columns."""

MOST_COLUMNS = 256
"""Columns in a CSV file. gpubench writes 50 for a collective."""

MOST_RESULT_LINES = 2**20
"""Lines in a text from nccl-tests or OSU, including NCCL's log lines. 1,024 ranks log 1,000 lines each."""

MOST_ROWS = 2**19
"""Rows in a file, including rows for pairs. 724 ranks form about as many ordered pairs. gpubench check writes
377,000 rows for 1,024 nodes with eight GPUs.
"""

MOST_ALIKE = 2**21
"""Rows of all sections in a JSON document that stores identical nodes once. gpubench topo writes 850,000 rows for
2,048 nodes with eight GPUs.
"""

MOST_RESULT_RANKS = 2**20
"""Ranks in the text of an nccl-tests run, as the text claims."""


# Logs.
MOST_LOG_FILES = 2**16
"""Log files, enough for one file per rank and communicator in the largest jobs. If there are more, the first ones
by name are read.
"""

MOST_LOG_BYTES, MOST_LOG_LINES = 2**36, 2**30
"""Size and lines of log text after decompression. Reading this much takes ten minutes
(`benchmarks/explain_speed.py`).
"""

MOST_LOG_SECONDS = 600.0
"""Time to read logs. A limit on bytes is not enough, because a short line takes as long as a long one."""

MOST_BYTES_WITHOUT_LINE_END = 2**26
"""Bytes without a line end. NCCL formats a line in a buffer of 1,024 bytes, so longer input is not a log, but for
example /dev/zero or zeros in a gzip file.
"""

MOST_DUMP_BYTES = 2**26
"""Size of one rank's Flight Recorder dump. 2,000 calls with their frames take 4 MB."""

MOST_INSPECTED = 2**21
"""Lines from NCCL's Inspector, each for one operation on one rank. This many lines take 0.5 GB of JSON, and as much
memory."""

MOST_LOG_RANKS = 2**18
"""Ranks of a communicator. The largest known clusters have about 100,000 GPUs."""

MOST_PLACES = 2**20
"""Sum of the ranks over all communicators in a log. 16,384 ranks with 16 communicators each reach a quarter of this
limit."""

MOST_COMMUNICATORS = 2**16
"""Communicators with distinct IDs."""

MOST_WITHOUT_ID = 2**11
"""Communicators without IDs, from NCCL before 2.17 or from logs without INIT. They are matched pairwise, which takes
n² steps.
"""

MOST_COMMS = 2**18
"""Pairs of a rank and a communicator with log lines, enough for 16,384 ranks with 16 communicators each."""

MOST_COMMS_OF_A_PROCESS = 2**13
"""Communicators per process. Every unknown log line is compared with all of them."""

MOST_PROCESSES = 2**17
"""Processes in a log. The largest known clusters have about 100,000 GPUs."""

MOST_THREADS_OF_A_PROCESS = 2**12
"""Threads per process. Their state is reset whenever a communicator is created."""

MOST_LOG_PAIRS = 2**23
"""Pairs of a rank and a peer, counted on both ranks. 2,048 fully connected ranks reach this limit and take 400 MB of
memory.
"""

MOST_AMBIGUOUS = 2**20
"""Channels that may belong to several communicators of a process, counted once per communicator. 64 channels to each
of 1,000 ranks in three communicators reach a fifth of this limit.
"""

MOST_EARLY_OF_A_THREAD = 2**13
"""Ranks whose connections a thread logs before its communicator is known. In a log without hosts, all connections
belong to a few threads.
"""

MOST_SETTINGS, MOST_REMARKS, MOST_WARNINGS = 2**14, 2**14, 2**8
"""Distinct settings, remarks and warnings that are kept. A job with thousands of ranks has fewer. Further ones are
only counted.
"""

MOST_TELLERS = 2**21
"""Settings, remarks and warnings, counted once for every process that logs them. 65,536 ranks with 30 each reach about
this limit.
"""
