"""The errors that are not bugs: each says what is wrong, with which value, and the way out."""

from pathlib import Path


class UserError(ValueError):
    """A mistake in what the user asked for; the command line prints it as one line and exits with 2."""


class FolderBusy(UserError):
    """Another process is writing to a folder."""


class RunFailed(RuntimeError):
    """A run can't go on; its state up to the last finished round is saved. The command line exits with 1."""


class CantWrite(RunFailed):
    """A run's file can't be written: the disk is full, say, or the folder read-only."""


class WorkerDied(RunFailed):
    """A process that trains clients ended by itself; the run's state up to the last finished round is saved."""


def first_line(error: Exception) -> str:
    """What an error says, in one line; its name if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def printable(text: str, most: int = 300) -> str:
    """A text of others that can stand in a sentence: one line, not too long, nothing that a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in text[:most])


class Interrupted(KeyboardInterrupt):
    """The run was stopped from outside after its state was saved; `path` is the folder to resume."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path
