"""`dynafed` and `python -m dynafed`."""

import signal
import sys


def main() -> int:
    """Run one command; returns the exit code."""
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:  # Ctrl-C ends the process, without a traceback, until the command line can say so itself
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dynafed.cli import main as run_command

    code = run_command()
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, with python -m: what lies around here isn't to be imported
    sys.exit(main())
