"""Code of the user's that is run again for a replay: which it is, where it runs, and what it may not touch."""
