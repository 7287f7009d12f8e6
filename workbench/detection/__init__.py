"""Spikes and drifts in recorded numbers, whoever recorded them: rules, their windows, and several runs together."""
