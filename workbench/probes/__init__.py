"""What is measured of a replayed step, and its neighbours."""
