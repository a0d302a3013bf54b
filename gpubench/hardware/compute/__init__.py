"""How long the computation of a model takes on one GPU: matrix products by CuPy, blocks by PyTorch."""
