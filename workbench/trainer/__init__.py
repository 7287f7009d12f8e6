"""The built-in trainer: one client of the core."""
