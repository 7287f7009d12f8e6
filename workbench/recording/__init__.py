"""The parts of a recorder: what it finds, draws, judges, logs and goes back to, one responsibility a module."""
