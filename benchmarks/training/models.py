"""The models whose steps are measured: only blocks, no embedding.

A `gpt` block is layer norm, attention, layer norm and two linear layers; an `mlp` block has only the linear layers.
"""

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "gpt-0.3B": {"kind": "gpt", "layers": 24, "hidden": 1024, "heads": 16, "sequence": 2048, "batch": 4},
    "gpt-0.8B": {"kind": "gpt", "layers": 16, "hidden": 2048, "heads": 16, "sequence": 2048, "batch": 4},
    "gpt-1.3B": {"kind": "gpt", "layers": 16, "hidden": 2560, "heads": 20, "sequence": 2048, "batch": 4},
    "gpt-7B": {"kind": "gpt", "layers": 32, "hidden": 4096, "heads": 32, "sequence": 2048, "batch": 1},
    "mlp-0.3B": {"kind": "mlp", "layers": 9, "hidden": 2048, "heads": 16, "sequence": 2048, "batch": 4},
    "mlp-0.8B": {"kind": "mlp", "layers": 6, "hidden": 4096, "heads": 32, "sequence": 2048, "batch": 4},
}

TINY = {
    "gpt-0.3B": {"kind": "gpt", "layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "batch": 2},
    "mlp-0.3B": {"kind": "mlp", "layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "batch": 2},
}
"""To try the program without a GPU."""

BUCKETS = (1, 5, 25, 100, 250, 1000)
"""DDP's bucket caps in MiB."""

MEGA = 2**20
