"""The parts of one replay of a recorded run: prepared, witnessed by another process, made a trace."""
