"""Explain what a job did, from NCCL logs, Flight Recorder dumps and RAS answers."""
