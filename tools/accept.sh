#!/usr/bin/env bash
# Everything that a change of the kernel has to pass on GPUs, in one go: about 6 minutes on 4 of them for forward, and
# again as much for training (the steps backward_*, overload_*, train_*).
#
#   tools/accept.sh [OUT [STEP...]]      logs and CSVs to OUT (default out/accept); only the named steps, in their order
#                                        here; PYTHON=... chooses the interpreter
#
# Prints one line a step and the last lines of its log; exit code 1 when any step failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/accept}
[ $# -eq 0 ] || shift
wanted=" $* "
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
    echo "accept: no GPU" >&2
    exit 1
fi
scenarios="calls graph busy streams"
training="train_graph train_faults"
if [ "$gpus" -ge 2 ]; then
    scenarios="$scenarios nccl kill late mismatch"
    training="$training train_nccl"
fi
shapes="--shape dsv3 flash qwen3-235b qwen3-30b gpt-oss-120b mixtral"
code=0

step() { # name, seconds, command ...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
    if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then verdict=ok; else verdict=FAIL code=1; fi
    echo "$verdict: $name, $((SECONDS - start)) s: $(tail -n 1 "$out/$name.log" | cut -c1-160)"
}
check() { # ranks, GPUs, tokens
    local where=$2 tokens=$3
    export CUDA_VISIBLE_DEVICES=$where
    step "random_ep$1" 120 "$python" tools/rank_check.py --backend mega --ranks "$1" --random 200 --repeat 2 \
        --csv "$out/random_ep$1.csv"
    # shellcheck disable=SC2086  # lists of words
    step "shapes_ep$1" 120 "$python" tools/rank_check.py --backend mega --ranks "$1" $shapes --tokens $tokens \
        --precision bf16 fp8 --csv "$out/shapes_ep$1.csv"
    step "backward_random_ep$1" 300 "$python" tools/rank_check.py --backend mega --direction backward --ranks "$1" \
        --random 100 --repeat 2 --fewer-sms 40 --csv "$out/backward_random_ep$1.csv"
    # shellcheck disable=SC2086
    step "backward_shapes_ep$1" 240 "$python" tools/rank_check.py --backend mega --direction backward --ranks "$1" \
        $shapes --tokens 1024 --precision bf16 fp8 --csv "$out/backward_shapes_ep$1.csv"
    step "overload_ep$1" 120 "$python" tools/rank_check.py --backend mega --direction step --ranks "$1" \
        --shape qwen3-30b --tokens 2048 --routing one_expert hot one_rank --csv "$out/overload_ep$1.csv"
    unset CUDA_VISIBLE_DEVICES
}

step compile 300 "$python" -m megamoe.jit --all
check 1 0 1024
if [ "$gpus" -ge 2 ]; then check 2 0,1 1024; fi
if [ "$gpus" -ge 4 ]; then check 4 0,1,2,3 "8 1024 8192"; fi
step tests 240 "$python" -m pytest -q -m "gpu or ep" tests
if command -v compute-sanitizer >/dev/null; then
    CUDA_VISIBLE_DEVICES=0 step memcheck 120 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
        "$python" tools/rank_check.py --backend mega --ranks 1 --random 12
fi
# shellcheck disable=SC2086
step soak 300 "$python" tools/soak.py $scenarios --bound 60
step train_soak 300 "$python" tools/soak.py train --steps 2000 --bound 280
# shellcheck disable=SC2086
step train_faults 240 "$python" tools/soak.py $training --bound 100
step demo_one_rank 240 make --no-print-directory demo
step demo_staged 120 make --no-print-directory demo ARGS="--steps 200 --compare staged"
step host_cost 120 "$python" tools/host_cost.py --check
step sweep 120 "$python" tools/latency_sweep.py --shape dsv3 flash qwen3-235b qwen3-30b --precision fp8 bf16 \
    --tokens 8192 --mode both --clock --backend mega --baseline staged --out "$out" --name sweep
step train_curves 300 "$python" tools/train_step.py --steps 300 --curves "$out/train_curves.png"
step train_sweep 300 "$python" tools/latency_sweep.py --direction step --shape qwen3-30b --tokens 8192 --precision bf16 \
    fp8 --reserve-sms 0 default --backend mega --baseline staged --out "$out" --name train_sweep
exit $code
