"""The libraries that move data between GPUs: found without loading them, asked in processes of their own."""
