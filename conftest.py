"""For every test run: what nbval leaves out when it compares a notebook's cells with what they showed before."""


def pytest_collectstart(collector):
    """A warning or a progress bar is no result. (Committed notebooks have none: see `test_notebooks`.)"""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
