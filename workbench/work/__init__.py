"""Slow work in a process of its own: it can be ended at any moment, and the notebook stays usable."""
