"""Logs and checkpoints that other programs wrote, read as they are: nothing is converted, no guess goes unsaid."""
