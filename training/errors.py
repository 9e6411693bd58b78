"""Exit codes and the errors that carry them: what a user or a scheduler is told when a run ends early."""

DONE = 0
UNEXPECTED = 1
EVICTED_SAVED = 42
EVICTED_UNSAVED = 43
CONFIGURATION = 44
DATA = 45
PREFLIGHT = 46
NO_USABLE_CHECKPOINT = 47
SUPERSEDED = 48
HUNG = 49


class TrainerError(Exception):
    """An error with one message for a human (what, where, what to do) and the exit code that tells its kind."""

    code = UNEXPECTED

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = type(self).code if code is None else code

    def __reduce__(self) -> tuple:
        """Keep the code when the error travels from rank 0 to the other ranks."""
        return type(self), (self.message, self.code)


class SupersededError(TrainerError):
    """Another attempt of this run has begun, or has committed the same step."""

    code = SUPERSEDED


class ConfigurationError(TrainerError):
    """The run cannot start as it is described."""

    code = CONFIGURATION


class DataError(TrainerError):
    """The dataset is missing or not what its manifest says."""

    code = DATA


class StoreError(TrainerError):
    """The object store refused or did not answer."""


class NoUsableCheckpointError(TrainerError):
    """There are committed checkpoints, and none of them can be trusted."""

    code = NO_USABLE_CHECKPOINT
