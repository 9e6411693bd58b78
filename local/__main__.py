"""The command line behind the Makefile: `python3 -m local up`. It starts on the machine's own Python, with nothing installed."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this is what tells the user
    sys.exit(f"trainyard needs Python 3.11 or newer, this is {sys.version.split()[0]}\n  do:    make PYTHON=python3.11 ...")

from local import commands

if __name__ == "__main__":
    sys.exit(commands.main(sys.argv[1:]))
