#!/usr/bin/env bash
# From a fresh clone to a trained model in one command, on a CPU: installs what is missing, makes a corpus from
# Python's own standard library, trains a tokenizer, then trains a small GPT with 4 processes, tensor 2 x pipeline 2,
# stops, resumes as tensor 2 x data 2, and lets the model write. Everything lies under runs/quickstart.
# A second call keeps the environment and the data, and trains anew into the next folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_data.sh"

STOP_AT=120    # steps in the first layout
STEPS=240     # steps in all

prepare_data
new_run runs/quickstart

MODEL=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model"
)
TRAINING=(
    --data-path "$DATA/corpus_text_document" --split 90,5,5
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$STEPS"
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 1.0
    --eval-interval 60 --eval-iters 2 --log-interval 20
    --save "$RUN/checkpoints" --save-interval "$STOP_AT"
    --tensorboard-dir "$RUN/tensorboard" --metrics-jsonl "$RUN/metrics.jsonl"
)

train() { # flags of the layout
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 \
        pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
}

say "training: 4 processes, tensor 2 x pipeline 2, to step $STOP_AT of $STEPS"
train --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --exit-interval "$STOP_AT"

say "the same run goes on in another layout: tensor 2 x data 2, to step $STEPS"
train --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --load "$RUN/checkpoints"

say "the model writes"
"$PYTHON" scripts/generate.py --load "$RUN/checkpoints" --tokenizer-model "$DATA/tokenizer.model" \
    --prompt "def read(self, " --num-tokens 80 --temperature 0.7 --top-k 40 --seed 1

say "done"
"$PYTHON" - "$RUN/metrics.jsonl" "$STOP_AT" <<'PYTHON'
import json
import sys

records = [json.loads(line) for line in open(sys.argv[1])]
loss = {r["iteration"]: r["lm_loss"] for r in records if "split" not in r}
stop, first, last = int(sys.argv[2]), min(loss), max(loss)
print(f"loss {loss[first]:.3f} at step {first}, {loss[stop]:.3f} at the stop at step {stop}, "
      f"{loss[stop + 1]:.3f} one step after the resume, {loss[last]:.3f} at step {last}")
PYTHON
cat <<END
checkpoint   $RUN/checkpoints
metrics      $RUN/metrics.jsonl
TensorBoard  $PYTHON -m tensorboard.main --logdir $RUN/tensorboard
END
