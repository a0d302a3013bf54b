"""What a GPU computes where nothing was measured: the rates of its data sheet, of which a share is reached.

Dense 16-bit Tensor Core TFLOP/s (without sparsity) and GB/s of memory, by the model's name, from NVIDIA's data sheets:
H100 and H200 (2024), A100 (2021), V100 (2020), B200 and GB200 (HGX and NVL72, 2024), GB300 (2025), L40S (2023), L4 and
A10, and the architecture papers of Ada and Blackwell for GeForce (16-bit with 32-bit accumulation).
"""

from dataclasses import dataclass

REACHED_SHARE = 0.52
"""Of the data sheet's TFLOP/s: 16 GPT blocks with hidden size 2048 take 82.8 ms forward and backward on an H200, for
4 × 2048 tokens, 42.9 TFLOP in all: 518 of 989 TFLOP/s. One model of one size."""

COPY_SHARE = 0.875
"""Of the data sheet's memory bandwidth: a copy of 512 MiB reads and writes 4,204 of 4,800 GB/s on an H200."""

SMALLEST_COPY_SECONDS = 2.5e-6
"""What a copy takes beside its bytes: 48 copies of 1.61 GB in all, there and back, take 1.66 ms on an H200, of which
1.53 are their bytes at the speed of large copies."""

BACKWARD_OVER_FORWARD = 2.0
"""Two matrix products for each of the forward pass: the gradients of input and of weights."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """TFLOP/s and GB/s of a data sheet."""

    tflops: float
    memory_gb_s: float


_SHEETS = {
    "GB300": DataSheet(2500, 8000),
    "B300": DataSheet(2250, 8000),
    "GB200": DataSheet(2500, 8000),
    "B200": DataSheet(2250, 8000),
    "H200": DataSheet(989, 4800),
    "H100 NVL": DataSheet(835, 3938),
    "H100 PCIe": DataSheet(756, 2039),
    "H100": DataSheet(989, 3350),
    "A100-SXM4-40GB": DataSheet(312, 1555),
    "A100-SXM4-80GB": DataSheet(312, 2039),
    "A100": DataSheet(312, 1935),
    "V100": DataSheet(125, 900),
    "L40S": DataSheet(362, 864),
    "L4": DataSheet(121, 300),
    "A10": DataSheet(125, 600),
    "RTX 4090": DataSheet(165, 1008),
    "RTX 5090": DataSheet(210, 1792),
}


def rates_of(name: str) -> DataSheet | None:
    """The rates of a GPU by NVML's name of its model; None where no data sheet is known.

    Whole words: an L40 is no L4. A laptop's GPU has the name of a larger one.
    """
    words = f" {name.removeprefix('NVIDIA ').replace('-', ' ')} "
    if "Laptop" in words:
        return None
    return next((rates for model, rates in _SHEETS.items() if f" {model.replace('-', ' ')} " in words), None)
