"""One worker process: ties itself to torchrun, keeps stdout for events, trains, and leaves its outcome for the launcher."""

import argparse
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

from training.config import RunConfig
from training.errors import UNEXPECTED, TrainerError
from training.events import Events, claim_stdout
from training.work import Outcome, Work, die_with_parent


def main() -> int:
    """Train and report; torchrun would turn every exit code into 1.

    An error that all ranks share ends the process with 0, because torchrun answers any other code by killing the ranks that still report.
    """
    die_with_parent()
    stdout = claim_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    work, rank = Work(parser.parse_args().work), int(os.environ["RANK"])
    order = work.order()
    config = RunConfig.model_validate(order.config)
    journal = work.ledger if rank == 0 else None
    be_quiet()

    # Torch takes seconds to load, and what is above must not wait for it.
    from training.ranks import leave
    from training.train import train

    with Path(os.devnull).open("w") as silence:
        events = Events(config.run, order.attempt, stdout if rank == 0 else silence, journal)
        try:
            outcome = Outcome(train(config, order, work, events))
        except TrainerError as error:
            outcome = Outcome(error.code, error.message)
        except Exception as error:  # noqa: BLE001 - the launcher is told of whatever it is
            traceback.print_exc()
            work.report(rank, Outcome(UNEXPECTED, f"{type(error).__name__}: {error}"))
            return 1
    work.report(rank, outcome)
    leave()
    return 0


def be_quiet() -> None:
    """Drop what torch says about its own insides: nobody who trains can act on it."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)


if __name__ == "__main__":
    sys.exit(main())
