"""The limits of what is read of NCCL's logs. Beyond one of them reading ends, and what was read is reported with it."""

MOST_FILES = 2**16
"""A file a rank and communicator of the largest jobs; beyond, the first by name are read."""

MOST_BYTES, MOST_LINES = 2**36, 2**30
"""Of text, unpacked: ten minutes of reading, as are 64 GiB at the speed of `benchmarks/explain_speed.py`."""

MOST_SECONDS = 600.0
"""Of reading, for short lines cost as much as long ones."""

MOST_BYTES_WITHOUT_LINE_END = 2**26
"""NCCL formats a line in 1,024 bytes. What has no end in 64 MiB is no log: /dev/zero, or zeros in a gzip."""

MOST_RANKS = 2**18
"""Of a communicator; the largest clusters known have some 100,000 GPUs."""

MOST_PLACES = 2**20
"""Ranks of all communicators together, as lines say: 16,384 ranks in 16 communicators each are a quarter of it."""

MOST_COMMUNICATORS = 2**16
"""Different ones, by their ids."""

MOST_WITHOUT_ID = 2**11
"""Communicators of NCCL before 2.17, and of logs without init, which are told apart by trying: n² times."""

MOST_COMMS = 2**18
"""Ranks of communicators of which there is a log: 16,384 ranks in 16 communicators each."""

MOST_COMMS_OF_A_PROCESS = 2**13
"""Every line that is not known is held against all of them."""

MOST_PROCESSES = 2**17
"""A quarter more than the largest clusters have GPUs."""

MOST_THREADS_OF_A_PROCESS = 2**12
"""All of them forget what they remember of lines whenever a communicator begins."""

MOST_PAIRS = 2**23
"""Of a rank and its peer, from both ends: 2,048 ranks that all talk to all, in 400 MB."""

MOST_AMBIGUOUS = 2**20
"""Channels that several communicators of a process may have, once for each: 64 to each of 1,000 ranks in three are a
fifth of it."""

MOST_EARLY_OF_A_THREAD = 2**13
"""Ranks of which a thread logs connections before it names a communicator: a log without hosts has all in a few."""

MOST_SETTINGS, MOST_REMARKS, MOST_WARNINGS = 2**14, 2**14, 2**8
"""Different ones; a job of thousands of ranks has fewer. Those beyond are counted, and reading goes on."""

MOST_TELLERS = 2**21
"""Of settings, remarks and warnings with the processes that log them: 30 of each of 65,536 ranks."""
