"""The commands of the trainer: python -m training COMMAND."""

import importlib
import sys

from training.errors import CONFIGURATION, DONE, TrainerError

COMMANDS = {
    "launch": ("training.launch", (), "train, as one attempt of a run: what a training pod does"),
    "prepare": ("training.prepare", (), "pack the files of a dataset into shards and upload them"),
    "warm": ("training.prepare", ("--warm",), "fill the cache of the dataset on this machine"),
    "keeper": ("training.keeper", (), "verify, prove and retain checkpoints beside the training; the launcher starts it"),
    "drill": ("training.drill", (), "restore the last-known-good checkpoint on another number of processes, and compare"),
    "export": ("training.export", (), "write the weights of a checkpoint as safetensors"),
}
USAGE = "\n".join(["usage: python -m training COMMAND [--help]", *(f"  {name:9}{about}" for name, (_, _, about) in COMMANDS.items())])


def main() -> int:
    """Run the command that the first word names; what follows is for it."""
    name, *rest = sys.argv[1:] or [""]
    if name not in COMMANDS:
        asked = name in {"-h", "--help"}
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return DONE if asked else CONFIGURATION
    module, words, _ = COMMANDS[name]
    sys.argv[1:] = [*words, *rest]
    try:
        return importlib.import_module(module).main()
    except TrainerError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
