"""Kill ranks of a job that torchrun starts again by itself, and see that it ends as if nobody had.

    python scripts/restart_runs.py --kills 2 --save runs/restarts

`torchrun --max-restarts` with --auto-resume: after each kill the job goes on from its last save, on two ranks, and the
losses of all steps must be those of an undisturbed run in every digit. Then half the ranks go on alone, as with
`--nnodes MIN:MAX` when hosts are gone: tensor, pipeline and global batch stay, the data size is halved, and losses must
agree up to rounding. Prints the seconds from each kill to the next step. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --micro-batch-size 1 "
    "--global-batch-size 32 --lr 1e-4 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer "
    "--num-workers 0 --auto-resume --save-interval 5 --log-interval 1 --hidden-dropout 0.1"
)
PATIENCE = 600.0        # seconds for a job to come to its next step, or to its end
CLOSE = 1e-4            # relative difference of losses that are summed in another order


def main(argv: Sequence[str] | None = None) -> int:
    """Kill as often as asked. Returns 0 where everything was as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--save", type=Path, required=True, help="folder that is not there yet")
    asked = parser.parse_args(argv)
    if asked.save.exists():
        parser.error(f"--save {asked.save}: is there already")
    steps, wrong = 12 * (asked.kills + 1), []
    for name, kills in ("straight", 0), ("killed", asked.kills):
        with start(asked.save / name, ranks=2, restarts=kills, steps=steps) as job:
            for kill in range(1, kills + 1):
                wait_for(job, asked.save / name, 12 * kill)
                os.kill(workers(job)[kill % 2], signal.SIGKILL)
                began, before = time.monotonic(), len(lines(asked.save / name))
                while len(lines(asked.save / name)) == before and job.poll() is None:
                    time.sleep(0.05)
                print(f"kill {kill}: next step after {time.monotonic() - began:.1f} s", flush=True)
            if job.wait(PATIENCE):
                wrong.append(f"{name}: exit code {job.returncode}")
    want = dict(lines(asked.save / "straight"))
    unlike = [at for at, loss in lines(asked.save / "killed") if loss != want[at]]
    wrong += [f"other losses at iterations {unlike}"] if unlike else []
    for name, ranks in ("straight", 2), ("killed", 1):
        with start(asked.save / name, ranks=ranks, restarts=0, steps=steps + 8) as job:
            if job.wait(PATIENCE):
                wrong.append(f"{name}: exit code {job.returncode} on {ranks} ranks")
    want, got = dict(lines(asked.save / "straight")), dict(lines(asked.save / "killed"))
    far = max((abs(got.get(at, 0) / loss - 1) for at, loss in want.items()), default=1.0)
    wrong += [f"losses on half the ranks differ by {far:.1e}"] if far > CLOSE else []
    print(f"{asked.kills} kills; losses on half the ranks within {far:.1e}; wrong: {wrong or 'nothing'}")
    return 1 if wrong else 0


@contextmanager
def start(folder: Path, *, ranks: int, restarts: int, steps: int) -> Iterator[subprocess.Popen]:
    """A job under torchrun, which does not outlive the context."""
    folder.mkdir(parents=True, exist_ok=True)
    words = f"{MODEL} --train-iters {steps} --save {folder}/saves --metrics-jsonl {folder}/metrics.jsonl".split()
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --max-restarts {restarts}".split()
    with open(folder / "log.txt", "a") as out:
        job = subprocess.Popen(
            ["env", "OMP_NUM_THREADS=1", sys.executable, *launcher, "pretrain_gpt.py", *words], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield job
    finally:
        job.terminate()
        job.wait()


def workers(job: subprocess.Popen) -> list[int]:
    """The processes that torchrun has started."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(job: subprocess.Popen, folder: Path, iteration: int) -> None:
    """Until a step has been told of."""
    end = time.monotonic() + PATIENCE
    while max((at for at, _ in lines(folder)), default=0) < iteration:
        if job.poll() is not None or time.monotonic() > end:
            raise ValueError(f"{folder}: the job did not come to iteration {iteration}: see log.txt")
        time.sleep(0.02)


def lines(folder: Path) -> list[tuple[int, float]]:
    """Iteration and loss of every step that was told of, whole lines alone."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]
    return [(record["iteration"], record["lm_loss"]) for record in records if "split" not in record]


if __name__ == "__main__":
    sys.exit(main())
