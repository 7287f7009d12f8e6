"""What a reader of telemetry says of a file, so that two of them can be compared."""

from workbench.errors import TelemetryError


def whole(path, reader):
    with open(path, "rb") as file:
        return reader(path).read(file)


def outcome(path, reader):
    """Everything that a reader says of a file: an error, or notices, other lines, and each column's bits."""
    try:
        found = whole(path, reader)
    except TelemetryError as error:
        return str(error)
    steps, validations = (
        {name: (table.column(name).dtype, table.column(name).tobytes()) for name in table.names} | {"rows": table.rows}
        for table in (found.steps, found.validations)
    )
    codes = found.steps.column("spike_rule")
    steps["spike_rule"] = None if codes is None else [([*found.rules, None])[code] for code in codes]
    return found.notices, found.others, steps, validations, found.steps.ragged, found.consumed, found.number
