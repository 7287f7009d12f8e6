"""Errors a user can act on. Each message is a sentence: what, where, what was found, what was expected, what to do.

    WorkbenchError
    ├── RunError          the run folder or its manifest
    ├── TelemetryError    a line of the run's JSONL
    ├── CheckpointError   a checkpoint that is missing, damaged, or of another shape
    ├── DataError         the corpus, or a batch
    ├── ExperimentError   a model, optimizer, sampler or option that cannot be rebuilt
    │   └── FactoryNeeded     the code that rebuilds the run is imported only when it is named
    ├── TrainingUnstable  a training that was taken back too many times in a row
    └── ReplayError       a replay that cannot be done as asked
        ├── EnvironmentMismatch   this machine computes differently from the one that recorded
        └── ChangedByHand         the loop changed the state on the way, and no checkpoint holds the change

The command line prints the sentence and exits with 2; the panel shows it in a red box.
"""


class WorkbenchError(Exception):
    """Base of every error that the workbench raises on purpose."""


class RunError(WorkbenchError):
    pass


class TelemetryError(WorkbenchError):
    pass


class CheckpointError(WorkbenchError):
    pass


class DataError(WorkbenchError):
    pass


class ExperimentError(WorkbenchError):
    pass


class FactoryNeeded(ExperimentError):
    pass


class TrainingUnstable(WorkbenchError):
    pass


class ReplayError(WorkbenchError):
    pass


class EnvironmentMismatch(ReplayError):
    pass


class ChangedByHand(ReplayError):
    """
    Attributes:
        step: the one before which the loop changed the state; None: it is not known.
    """

    def __init__(self, sentence: str, step: int | None = None) -> None:
        super().__init__(sentence)
        self.step = step
