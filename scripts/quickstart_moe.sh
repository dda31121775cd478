#!/usr/bin/env bash
# A mixture of experts in one command, on a CPU: trains a small PR-MoE (a pyramid of 2 and 4 experts, an MLP beside them)
# with 4 processes, tensor 2 x data 2 with each layer's experts over 2 ranks; goes on with the larger layer over 4; then
# distils a smaller student from it (MoS) as pipeline 2 x data 2. Corpus and tokenizer are those of quickstart.sh.
# Everything lies under runs/quickstart_moe; a second call trains anew into the next folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_data.sh"

STOP_AT=60      # teacher's steps in the first layout
STEPS=120       # teacher's steps in all
LEAVE_AT=60     # student's steps with the teacher
ALONE_TO=80     # student's steps in all

prepare_data
new_run runs/quickstart_moe

train() { # NAME STEPS and flags
    local out="$RUN/$1" steps="$2"
    shift 2
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py \
        --hidden-size 128 --num-attention-heads 4 --seq-length 128 --swiglu --disable-bias-linear \
        --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
        --expert-interval 2 --mlp-type residual --topk 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.25 \
        --moe-eval-capacity-factor 2 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model" \
        --data-path "$DATA/corpus_text_document" --split 90,5,5 \
        --micro-batch-size 4 --global-batch-size 16 --train-iters "$steps" \
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 1.0 \
        --eval-interval "$steps" --eval-iters 2 --log-interval 20 --save "$out/checkpoints" --save-interval "$STOP_AT" \
        --tensorboard-dir "$out/tensorboard" --metrics-jsonl "$out/metrics.jsonl" "$@"
}

teach() { # the PR-MoE: flags of the layout
    train teacher "$STEPS" --num-layers 4 --num-experts 2 4 "$@"
}

say "PR-MoE: tensor 2 x data 2, experts over 2 ranks, to step $STOP_AT of $STEPS"
teach --tensor-model-parallel-size 2 --moe-expert-parallel-size 2 --exit-interval "$STOP_AT"

say "the same run goes on with experts over 4 ranks, to step $STEPS"
teach --tensor-model-parallel-size 2 --moe-expert-parallel-size 4 --load "$RUN/teacher/checkpoints"

say "MoS: a student with 3 of 4 layers, pipeline 2 x data 2, distilled to step $LEAVE_AT of $ALONE_TO"
train student "$ALONE_TO" --num-layers 3 --num-experts 4 --pipeline-model-parallel-size 2 --moe-expert-parallel-size 2 \
    --mos --load-teacher "$RUN/teacher/checkpoints" --num-layers-teacher 4 --num-experts-teacher 2 4 \
    --kd-alpha-ce 1 --kd-beta-ce 1 --kd-temp 1 --kd-stop-iteration "$LEAVE_AT"

say "done"
"$PYTHON" - "$RUN" "$STOP_AT" "$LEAVE_AT" <<'PYTHON'
import json
import sys

run, stop, leave = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def steps_of(name):
    records = [json.loads(line) for line in open(f"{run}/{name}/metrics.jsonl")]
    return {record["iteration"]: record for record in records if "split" not in record}


def loads(step):
    for layer in step["experts"]:
        total = sum(layer["counts"])
        shares = " ".join(f"{count / total:.2f}" for count in layer["counts"])
        print(f"  layer {layer['layer']}: experts take {shares} of the choices, {layer['dropped'] / total:.1%} dropped, "
              f"aux loss {layer['aux_loss']:.3f}")


teacher, student = steps_of("teacher"), steps_of("student")
last, end = teacher[max(teacher)], student[max(student)]
print(f"PR-MoE: loss {teacher[1]['lm_loss']:.3f} at step 1, {teacher[stop]['lm_loss']:.3f} at the stop at step {stop}, "
      f"{teacher[stop + 1]['lm_loss']:.3f} one step after the resume, {last['lm_loss']:.3f} at step {max(teacher)}")
loads(last)
print(f"MoS: loss {student[1]['lm_loss']:.3f} and distance from the teacher {student[1]['kd_loss']:.3f} at step 1, "
      f"{student[leave]['lm_loss']:.3f} and {student[leave]['kd_loss']:.3f} at step {leave}, "
      f"{end['lm_loss']:.3f} alone at step {max(student)}")
loads(end)
PYTHON
cat <<END
teacher      $RUN/teacher/checkpoints
student      $RUN/student/checkpoints
metrics      $RUN/teacher/metrics.jsonl, $RUN/student/metrics.jsonl
TensorBoard  $PYTHON -m tensorboard.main --logdir $RUN
END
