"""The lines of a telemetry file: their types, the strict reader, and columns of them with a cache."""
