# Sourced by pretraining.sh and moe_pretraining.sh: starts pretrain_gpt.py with FLAGS.
#
#   launch OUT        on NODES x GPUS_PER_NODE processes, one call per node
#
# From the environment; paths are relative to the repository:
#
#   NODES=8 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 GPUS_PER_NODE=8
#   DRY_RUN=1         print the layout and its memory beside that of a device (GPU_MEMORY_GB=80), and start nothing
#   DRY_RUN=command   print the command, one word per line
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

launch() {
    local out="$1" nodes="${NODES:-1}" gpus="${GPUS_PER_NODE:-8}" start
    if [ "${DRY_RUN:-0}" = command ]; then
        printf '%s\n' pretrain_gpt.py "${FLAGS[@]}"
        return
    fi
    cd "$ROOT"
    prepare_environment
    if [ "${DRY_RUN:-0}" = 1 ]; then
        # The vocabulary is told: no file of it need be there.
        "$PYTHON" pretrain_gpt.py --print-layout --world-size $((nodes * gpus)) --vocab-size "$VOCAB" \
            --device-memory-gb "${GPU_MEMORY_GB:-80}" "${FLAGS[@]}"
        return
    fi
    mkdir -p "$out"
    start=("$PYTHON")
    if [ $((nodes * gpus)) -gt 1 ] && ! [[ " ${FLAGS[*]} " = *" --print-layout "* ]]; then
        start+=(
            -m torch.distributed.run --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$gpus"
            --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"
        )
    fi
    "${start[@]}" pretrain_gpt.py "${FLAGS[@]}"
}
