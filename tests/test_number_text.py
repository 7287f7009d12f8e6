"""One way of writing a number for people."""

import math

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text

from workbench.cause.verdict_tables import Hanging
from workbench.cli import main
from workbench.number_text import number
from workbench.screen import markup


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (2.50912, 4, "2.509"),
        (0.0, 4, "0"),
        (12345.0, 4, "1.234e4"),
        (999_999.0, 6, "999999"),
        (1.929e26, 4, "1.929e26"),
        (-2e30, 3, "-2e30"),
        (0.000357454, 6, "3.57454e-4"),
        (0.0100000001, 4, "0.01"),
        (100.0, 3, "100"),
        (math.nan, 4, "NaN"),
        (-math.inf, 4, "-inf"),
        (np.float32("nan"), 4, "NaN"),
        (np.float32(0.1), 6, "0.1"),
    ],
)
def test_numbers(value, digits, text):
    assert number(value, digits) == text == markup.number(value, digits)


def test_every_number_can_be_read_back():
    """What an experiment is told, `lr=3.57454e-4`, is read as a number."""
    for power in range(-30, 31):
        assert float(number(1.23456 * 10.0**power, 6)) == pytest.approx(1.23456 * 10.0**power, rel=1e-9)


def test_no_command_has_a_description_that_is_cut_off():
    for group in ([], ["bench"]):
        said = CliRunner().invoke(main, [*group, "--help"], terminal_width=80)
        assert said.exit_code == 0 and "..." not in said.output.partition("Commands:")[2], said.output


def test_what_is_wrapped_of_a_line_is_indented():
    console = Console(width=40)
    with console.capture() as seen:
        console.print(Hanging(Text("evidence: " + "word " * 20)))
    lines = seen.get().splitlines()
    assert lines[0].startswith("  evidence: word") and len(lines) > 2
    assert all(line.startswith("    word") for line in lines[1:]) and max(map(len, lines)) <= 40
