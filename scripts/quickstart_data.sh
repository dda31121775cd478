# Sourced by quickstart.sh and quickstart_moe.sh: sets PYTHON and DATA, and makes the corpus and the tokenizer of both.
#
#   prepare_data        the caller has `set -euo pipefail`, and is in the repository afterwards
#   new_run FOLDER      sets RUN to a new folder FOLDER/run-N
#   say WORDS           a headline with the seconds since prepare_data
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

say() { printf '\n== [%d s] %s\n' "$SECONDS" "$*"; }

prepare_data() {
    cd "$ROOT"
    prepare_environment
    SECONDS=0
    export OMP_NUM_THREADS=1
    DATA=runs/quickstart/data
    mkdir -p "$DATA"
    if [ ! -e "$DATA/corpus.jsonl" ]; then
        say "corpus: the sources of Python's standard library -> $DATA/corpus.jsonl"
        "$PYTHON" data_tools/make_corpus.py --output "$DATA/corpus.jsonl" --max-megabytes 10
    fi
    if [ ! -e "$DATA/tokenizer.model" ]; then
        say "tokenizer: SentencePiece with 4096 entries -> $DATA/tokenizer.model"
        "$PYTHON" data_tools/train_tokenizer.py --input "$DATA/corpus.jsonl" --vocab-size 4096 \
            --max-sentences 50000 --model-prefix "$DATA/tokenizer"
    fi
    if [ ! -e "$DATA/corpus_text_document.idx" ]; then
        say "tokens -> $DATA/corpus_text_document.bin"
        "$PYTHON" data_tools/preprocess_data.py --input "$DATA/corpus.jsonl" --output-prefix "$DATA/corpus" \
            --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model" --append-eod --workers 2
    fi
}

new_run() { # FOLDER
    local number=1
    mkdir -p "$1"
    while [ -e "$1/run-$number" ]; do number=$((number + 1)); done
    RUN="$1/run-$number"
    mkdir "$RUN"
}
