"""Every exception BlockTrain raises on purpose, sorted by who should act.

    BlocktrainError
    ├── UserError            the person at the keyboard: a bad recipe, path or flag (exit code 2)
    │   ├── RecipeError      a recipe key, value or combination
    │   ├── DataError        a corpus that is missing, empty, not text or too short
    │   ├── CheckpointError  a checkpoint that is missing, truncated or of another shape
    │   └── DeviceError      a device that does not exist here
    ├── DivergedError        the person at the keyboard: a loss that is no longer finite
    ├── StorageError         the operator: a full disk, a database or blob store that does not answer
    │   └── DamagedError     the operator: what was stored is no longer what was written (exit code 2)
    ├── StoppedError         nobody: the person asked to stop; what was done is saved (exit code 130)
    └── WireError            the peer: bytes or a message that break the protocol

Each message gives what was expected, what was found and what to do about it.
"""


class BlocktrainError(Exception):
    """Base of the tree; the command line prints its message in one line."""

    exit_code = 1


class UserError(BlocktrainError):
    exit_code = 2


class RecipeError(UserError):
    pass


class DataError(UserError):
    pass


class CheckpointError(UserError):
    pass


class DeviceError(UserError):
    pass


class DivergedError(BlocktrainError):
    pass


class StorageError(BlocktrainError):
    """A failure and not misuse: the same command works once there is space, or the database is up. systemd
    starts a service again after 1 and leaves it after 2 (deploy/)."""


class DamagedError(StorageError):
    exit_code = 2


class StoppedError(BlocktrainError):
    exit_code = 130


class WireError(BlocktrainError):
    pass
