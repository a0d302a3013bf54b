"""The limits of what is read of machines: of a file that describes one, and of a recording of many."""

MOST_BYTES = 4 * 2**20
"""Of a file of `--from`, far more than the description of a node takes: nvidia-smi -q of eight GPUs is below 1 MiB."""

MOST_GPUS, MOST_NICS, MOST_SWITCHES = 128, 512, 1024
"""Of a node in a file: several times what the largest machines have. A file with more is none of a machine, and its
pairs would take hours."""

MOST_SWITCHES_ABOVE = 64
"""Of one device."""

MOST_PCI_DEVICES, MOST_BRIDGES_ABOVE = 4096, 64
"""Of a node, and of one device."""

MOST_PAIRS = 2**17
"""Of devices of a node in a snapshot: 128 GPUs and 200 NICs have as many."""

LONGEST_LINE = 8192
"""Characters of a line of nvidia-smi: a row of 16 GPUs and 32 NICs takes some 400."""

MOST_NODES = 4096
"""Of a recording: 32,768 ranks in nodes of eight, a minute of reading."""

MOST_NODE_BYTES = 16 * 2**20
"""Of one node's file: 64 GPUs with 1,000 PCI devices take 2 MiB."""

MOST_NODES_BYTES = 256 * 2**20
"""Of all nodes' files together: 3,800 nodes of eight GPUs and eight NICs, which are 1 GB in memory."""

MOST_RANKS_BYTES, MOST_RANKS = 128 * 2**20, 2**16
"""Of `ranks.jsonl`, and its lines: the facts of thirty thousand ranks."""

MOST_SAMPLES_BYTES, MOST_SAMPLES = 2**30, 2**19
"""Of a file of samples, and its lines: thirty thousand ranks that say of fifty rows when they came."""
