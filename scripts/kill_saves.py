"""Kill a random rank of a run that saves all the time, at random moments, and see that no save is lost or spoiled.

    python scripts/kill_saves.py --kills 30 --ranks 2 --save runs/kills

Each time the run is started again as a user would, with --auto-resume, saving at every step, in turn with and without
--async-save. After a kill the newest save must not be older than the last one that the run said it had made, every byte
of every complete save must verify, the next start must go on from the newest, and steps that are made again must have
the loss that they had. Prints what it saw of each kill and, last, how many saves were lost or spoiled: exit code 1 if
any was.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from megazero.checkpoint import folder_of, iterations, latest  # noqa: E402
from megazero.checkpoint_index import INDEX  # noqa: E402
from scripts.ranks import spoiled, start_ranks  # noqa: E402

# A save of its 3.7 million parameters takes about as long as a step.
MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 16 --vocab-size 8192 --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-4 --lr-decay-style constant --train-iters 1000000 --mock-data --tokenizer-type "
    "NullTokenizer --num-workers 0 --save-interval 1 --auto-resume --keep-last 2 --log-interval 1"
)
PATIENCE = 240.0        # seconds until a run has made its first save


def main(argv: Sequence[str] | None = None) -> int:
    """Kill as often as asked. Returns 0 where no save was lost or spoiled."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save", type=Path, required=True, help="folder that is not there yet")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    if asked.save.exists():
        parser.error(f"--save {asked.save}: is there already")
    asked.save.mkdir(parents=True)
    draw, wrong, in_a_save = random.Random(asked.seed), [], 0
    for number in range(1, asked.kills + 1):
        how = "--async-save" if number % 2 == 0 else ""
        before = latest(asked.save / "saves", say=lambda line: None)
        said, victim = run_and_kill(asked.save, asked.ranks, how, draw)
        began = re.search(r"going on after iteration (\d+)", said)
        found = check(asked.save, said)
        if before is not None and (began is None or int(began[1]) != before):
            found.append(f"went on after {began and began[1]} instead of {before}")
        wrong += found
        newest = latest(asked.save / "saves", say=lambda line: None)
        broken_off = is_broken_off(asked.save / "saves")
        in_a_save += broken_off
        moment = "in a save" if broken_off else "between saves"
        print(f"kill {number} {how or '(plain)'}: rank {victim}, {moment}, newest {newest}; {found or 'all is well'}",
              flush=True)
    wrong += unlike_losses(asked.save / "metrics.jsonl")
    print(f"{asked.kills} kills, {in_a_save} in a save; lost or spoiled saves: {len(wrong)}")
    return 1 if wrong else 0


def run_and_kill(folder: Path, ranks: int, how: str, draw: random.Random) -> tuple[str, int]:
    """Start a run, kill one rank at a random moment of one of its saves but the first, and the others as a launcher
    does; what rank 0 said, and who was killed."""
    words = f"{MODEL} {how} --save {folder}/saves --metrics-jsonl {folder}/metrics.jsonl".split()
    log = folder / "log.txt"
    with open(log, "w") as out:
        processes = start_ranks(words, ranks, out)
        try:
            limit = time.monotonic() + PATIENCE
            while "saved " not in log.read_text():
                if time.monotonic() > limit or any(process.poll() is not None for process in processes):
                    raise ValueError(f"the run did not come to its first save:\n{log.read_text()}")
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 1))
            while not is_broken_off(folder / "saves") and time.monotonic() < limit:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.1))            # somewhere in a save, or just after it
            victim = draw.randrange(ranks)
            processes[victim].send_signal(signal.SIGKILL)
            time.sleep(draw.uniform(0, 0.3))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return log.read_text(), victim


def check(folder: Path, said: str) -> list[str]:
    """What is wrong with the saves: one that the run spoke of and that is not there, bytes that do not verify."""
    root, wrong = folder / "saves", []
    newest = latest(root, say=lambda line: None)
    told = [int(number) for number in re.findall(r"saved \S*iter_(\d+)\n", said)]
    if newest is None or newest < max(told):
        wrong.append(f"lost: said to have saved {max(told)}, the newest is {newest}")
    return wrong + spoiled(root)


def is_broken_off(root: Path) -> bool:
    """Whether a save has begun that has not come to its end."""
    newest = max(iterations(root), default=None)
    return newest is not None and not (folder_of(root, newest) / INDEX).exists()


def unlike_losses(path: Path) -> list[str]:
    """Steps that were made twice with another loss."""
    seen: dict[int, float] = {}
    wrong = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue                # the kill came while it was written
        loss = seen.setdefault(record["iteration"], record["lm_loss"])
        if loss != record["lm_loss"]:
            wrong.append(f"spoiled: iteration {record['iteration']} has loss {loss} and then {record['lm_loss']}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
