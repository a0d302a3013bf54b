"""What jobs that hang leave behind: dumps of PyTorch's Flight Recorder, and answers of NCCL's RAS."""
