# Sourced by pretraining.sh and moe_pretraining.sh: starts pretrain_gpt.py with FLAGS.
#
#   launch OUT        on NODES x GPUS_PER_NODE processes, one call per node
#
# From the environment; paths are relative to the repository:
#
#   NODES=8 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 GPUS_PER_NODE=8
#   NODES=6:8 ...     hosts that come and go; MAX_RESTARTS=3: begin again where processes died (docs/clusters.md)
#   DRY_RUN=1         print the layout and its memory beside that of a device (GPU_MEMORY_GB=80), and start nothing
#   DRY_RUN=command   print the command, one word per line
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

launch() {
    local out="$1" nodes="${NODES:-1}" gpus="${GPUS_PER_NODE:-8}" most start
    most=$((${nodes#*:} * gpus))
    if [ "${DRY_RUN:-0}" = command ]; then
        printf '%s\n' pretrain_gpt.py "${FLAGS[@]}"
        return
    fi
    cd "$ROOT"
    prepare_environment
    if [ "${DRY_RUN:-0}" = 1 ]; then
        # The vocabulary is told: no file of it need be there.
        "$PYTHON" pretrain_gpt.py --print-layout --world-size "$most" --vocab-size "$VOCAB" \
            --device-memory-gb "${GPU_MEMORY_GB:-80}" "${FLAGS[@]}"
        return
    fi
    mkdir -p "$out"
    start=("$PYTHON")
    if [[ " ${FLAGS[*]} " = *" --print-layout "* ]]; then
        :
    elif [[ "$nodes" = *:* || "${MAX_RESTARTS:-0}" -gt 0 ]]; then
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        start+=(
            -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$gpus" --rdzv-backend c10d
            --rdzv-endpoint "${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29500}" --rdzv-id "${out##*/}"
            --max-restarts "${MAX_RESTARTS:-100}"
        )
    elif [ "$most" -gt 1 ]; then
        start+=(
            -m torch.distributed.run --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$gpus"
            --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"
        )
    fi
    "${start[@]}" pretrain_gpt.py "${FLAGS[@]}"
}
