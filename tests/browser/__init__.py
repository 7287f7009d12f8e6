"""JupyterLab as people use it: in a real browser. What drives it, what looks at it, and the tests."""
