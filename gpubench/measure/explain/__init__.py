"""Explains a job from NCCL logs, Flight Recorder dumps and RAS answers."""
