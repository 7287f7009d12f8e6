"""Runs that several processes train together, each on a batch of its own, under MLX's launcher."""
