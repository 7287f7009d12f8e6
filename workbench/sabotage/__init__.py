"""How planted faults are put into a run."""
