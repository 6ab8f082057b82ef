"""Every error that Backstay raises, as one closed tree.

Each class also inherits the built-in it specialises, so callers may catch either. All of them carry a single message
string and stay picklable, because errors travel between ranks and from the writer to its trainer.
"""


class BackstayError(Exception):
    """Base of all errors raised by Backstay on purpose."""


# What the caller did or holds -----------------------------------------------------------------------------------------


class InvalidArgument(BackstayError, ValueError):
    """An argument has a value that cannot be used."""


class StateError(BackstayError, ValueError):
    """The train state cannot be turned into a checkpoint: a name clash, an unknown type, a foreign parameter."""


class StepExists(BackstayError, FileExistsError):
    """A committed checkpoint of that step is there already; it is never overwritten."""


class UsedRoot(BackstayError, ValueError):
    """The root holds checkpoints that this run did not restore from, so it may not write there."""


class ConfigError(InvalidArgument):
    """A configuration has an unknown or ill-typed key, or values that do not go together."""


class ConfigChanged(ConfigError):
    """A run would be resumed with other data, another model or another seed than it was saved with."""


class DataError(BackstayError, ValueError):
    """A data set cannot be used; the message names file, line and field."""


class ModelError(BackstayError, ValueError):
    """A model or tokenizer directory cannot be used as it is."""


class Diverged(BackstayError, ArithmeticError):
    """The loss or the gradients are no longer finite numbers."""


# Agreement between ranks ------------------------------------------------------------------------------------------------


class RanksDisagree(BackstayError, RuntimeError):
    """Ranks called with different steps, directories or states."""


class RankFailed(BackstayError, RuntimeError):
    """One or more ranks could not do their part; the message names each and its cause."""


class RankMissing(BackstayError, TimeoutError):
    """Ranks did not arrive within the time limit; the message names them."""


# The way out ------------------------------------------------------------------------------------------------------------


class SaveFailed(BackstayError, OSError):
    """A save was not committed; the previous checkpoint is untouched."""


class WriterDied(SaveFailed):
    """A writer process ended in the middle of a save."""


class CommitTimeout(SaveFailed, TimeoutError):
    """The coordinator waited in vain for some ranks to finish writing."""


class ExportFailed(BackstayError, OSError):
    """A model was not written for others; the message names the step, if there is one, and the cause."""


# The way back -----------------------------------------------------------------------------------------------------------


class CheckpointNotFound(BackstayError, FileNotFoundError):
    """The named step or path holds no committed checkpoint."""


class NoUsableCheckpoint(BackstayError, FileNotFoundError):
    """The root holds checkpoints, but none of them is whole."""


class CorruptCheckpoint(BackstayError, ValueError):
    """The checkpoint's content is not what its manifest says, or is not a checkpoint at all."""


class StateMismatch(BackstayError, ValueError):
    """Checkpoint and live state differ: missing, unexpected, shape or dtype; all of them listed by path."""


class BaseMismatch(BackstayError, ValueError):
    """The checkpoint holds trainable weights only and was made on another base model."""
