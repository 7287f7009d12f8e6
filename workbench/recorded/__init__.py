"""A run as its folder holds it: read, listed, and a replay of it planned. Computes no step."""
