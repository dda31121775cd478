"""Stop a run at random moments, with a signal to all its ranks, and see that it ends as if nobody had.

    python scripts/stop_runs.py --stops 20 --ranks 2 --save runs/stops

Each time the run is started as a user would, with --auto-resume and evaluations, and gets SIGTERM or SIGUSR1 at a
random moment of its start, its training, an evaluation or a save. All processes must be gone within 20 seconds, with
code 0 or by the signal while Python still starts, and every save must verify. Last it runs to its end beside a run that
nobody disturbs: losses and every bit of the final state must be equal. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

import torch  # noqa: E402

from megazero.checkpoint import folder_of, latest  # noqa: E402
from scripts.ranks import read_save, spoiled, start_ranks  # noqa: E402

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --micro-batch-size 1 "
    "--global-batch-size 16 --lr 1e-4 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer "
    "--num-workers 0 --auto-resume --save-interval 7 --eval-interval 5 --eval-iters 3 --log-interval 1 "
    "--hidden-dropout 0.1 --pipeline-model-parallel-size 2"
)
LIMIT = 20.0            # seconds from the signal to the end of the last process
PATIENCE = 300.0        # seconds for a run that nobody stops


def main(argv: Sequence[str] | None = None) -> int:
    """Stop as often as asked. Returns 0 where everything was as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iters", type=int, default=100, help="steps of the whole run")
    parser.add_argument("--latest", type=float, default=12.0, help="seconds after its start in which a run is stopped")
    parser.add_argument("--save", type=Path, required=True, help="folder that is not there yet")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    if asked.save.exists():
        parser.error(f"--save {asked.save}: is there already")
    asked.save.mkdir(parents=True)
    draw, wrong = random.Random(asked.seed), []
    for number in range(1, asked.stops + 1):
        how = draw.choice((signal.SIGTERM, signal.SIGUSR1))
        codes, seconds = run(asked.save / "stopped", asked, how, draw.uniform(0, asked.latest))
        found = [] if seconds < LIMIT else [f"gone after {seconds:.1f} s only"]
        found += [f"exit codes {codes}"] if any(code not in (0, -how) for code in codes) else []
        found += spoiled(asked.save / "stopped/saves")
        wrong += found
        newest = latest(asked.save / "stopped/saves", say=lambda line: None)
        told = f"{how.name}, codes {codes} after {seconds:.1f} s, newest {newest}"
        print(f"stop {number}: {told}; {found or 'all is well'}", flush=True)
    for name in "stopped", "straight":
        codes, _ = run(asked.save / name, asked, None, PATIENCE)
        wrong += [f"{name}: exit codes {codes} at the end"] if any(codes) else []
    wrong += [] if wrong else unlike(asked.save, asked.iters)
    print(f"{asked.stops} stops; wrong: {wrong or 'nothing'}")
    return 1 if wrong else 0


def run(
    folder: Path, asked: argparse.Namespace, how: signal.Signals | None, seconds: float
) -> tuple[list[int], float]:
    """Start all ranks and signal them after some seconds; their exit codes, and how long they took from then on."""
    folder.mkdir(exist_ok=True)
    words = f"{MODEL} --train-iters {asked.iters} --save {folder}/saves --metrics-jsonl {folder}/metrics.jsonl".split()
    with open(folder / "log.txt", "a") as out:
        processes = start_ranks(words, asked.ranks, out)
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until and any(process.poll() is None for process in processes):
                time.sleep(0.02)
            began = time.monotonic()
            for process in processes if how is not None else ():
                process.send_signal(how)
            while time.monotonic() - began < 3 * LIMIT and any(process.poll() is None for process in processes):
                time.sleep(0.02)
            took = time.monotonic() - began
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [process.returncode for process in processes], took


def unlike(folder: Path, last: int) -> list[str]:
    """In what the run that was stopped differs from the one that was not."""
    told = []
    for name in "stopped", "straight":
        lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        told.append([(line["iteration"], line["lm_loss"]) for line in lines if "split" not in line])
    wrong = [] if told[0] == told[1] else ["the losses differ"]
    got, want = (read_save(folder_of(folder / name / "saves", last)) for name in ("stopped", "straight"))
    return wrong + [f"{key} differs" for key in want if not torch.equal(got[key], want[key])]


if __name__ == "__main__":
    sys.exit(main())
