#!/usr/bin/env bash
# Everything that a change of the kernel has to pass on 1 to 8 GPUs: about 20 minutes on 2 of them. Steps of one rank
# run side by side, one a GPU; steps that use several GPUs, or that measure, run alone. Tests and soaks share
# all GPUs: these are taken from kernels in between, which has shown a fault that nothing else did. On one GPU ranks
# share it, in its time slices, and so do all steps that judge.
#
#   tools/accept.sh [OUT [STEP...]]      logs and CSVs to OUT (default out/accept); only the named steps, in their order
#                                        here; PYTHON=... chooses the interpreter
#
# Prints one line a step and the last lines of its log; exit code 1 when any step failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-out/accept}
[ $# -eq 0 ] || shift
wanted=" $* "
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
rm -f "$out"/*.failed
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
    echo "accept: no GPU" >&2
    exit 1
fi
ranks=$((gpus > 2 ? gpus : 2))
scenarios="calls graph busy streams kill late mismatch --ranks $ranks"
training="train_graph train_faults --ranks $ranks"
if [ "$gpus" -ge 2 ]; then
    scenarios="nccl $scenarios"
    training="train_nccl $training"
else # each call waits for several time slices
    export MEGAMOE_SHARE_GPUS=1
    scenarios="$scenarios --calls 500 --replays 100"
    training="$training --replays 100"
fi
shapes="--shape dsv3 flash qwen3-235b qwen3-30b gpt-oss-120b mixtral"
# What holds several copies of all experts, or of several ranks, on a GPU of 80 GB: without DeepSeek-V3.
large=$shapes
small=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | awk '$1 < 100000 { found = 1 } END { print found + 0 }')
if [ "$small" -eq 1 ]; then large=${shapes/dsv3 /}; fi
step() { # name, seconds, command ...
    local name=$1 limit=$2 start=$SECONDS verdict=ok
    shift 2
    [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || { verdict=FAIL && touch "$out/$name.failed"; }
    echo "$verdict: $name, $((SECONDS - start)) s: $(tail -n 1 "$out/$name.log" | cut -c1-160)"
}
lanes=() # lane i: steps, one behind the other; side by side with those of the others
lane() { # lane, name, seconds, command ...
    local i=$1
    shift
    lanes[i]="${lanes[i]:-}$(printf '%q ' step "$@");"
}
side_by_side() {
    local i
    for i in "${!lanes[@]}"; do (eval "${lanes[i]}") & done
    wait
    lanes=()
}
next=0
single() { # a step of one GPU: to the GPUs in turns
    lane $((next % gpus)) "$1" "$2" env CUDA_VISIBLE_DEVICES=$((next % gpus)) "${@:3}"
    next=$((next + 1))
}
shared() { # a step that shares all GPUs with others; those that hold much memory in one lane
    case $1 in
    *shapes* | overload*) lane 0 "$@" ;;
    random* | panels* | channel*) lane 1 "$@" ;;
    backward_random* | e4m3* | fp4*) lane 2 "$@" ;;
    tests) lane 3 "$@" ;;
    soak | train_faults) lane 4 "$@" ;;
    *) lane 5 "$@" ;;
    esac
}
check() { # how: step, single or shared; ranks; tokens
    local how=$1 ranks=$2 tokens=$3
    local judge="$python tools/rank_check.py --backend mega --ranks $ranks" forward=$shapes heavy=$how
    [ "$ranks" -le "$gpus" ] || forward=$large
    # Two ranks' gradients of a large shape fill most of a GPU: at first, and by themselves.
    [ "$ranks" -le "$gpus" ] || heavy=step
    # shellcheck disable=SC2086  # lists of words
    {
        $how "random_ep$ranks" 180 $judge --random 200 --repeat 2 --csv "$out/random_ep$ranks.csv"
        $how "backward_random_ep$ranks" 300 $judge --direction backward --random 100 --repeat 2 --fewer-sms 40 \
            --csv "$out/backward_random_ep$ranks.csv"
        $how "e4m3_random_ep$ranks" 180 $judge --direction backward --random 50 --repeat 2 --precision fp8 \
            --weight-gradients e4m3 --csv "$out/e4m3_random_ep$ranks.csv"
        $how "shapes_ep$ranks" 120 $judge $forward --tokens $tokens --precision bf16 fp8 \
            --csv "$out/shapes_ep$ranks.csv"
        $heavy "backward_shapes_ep$ranks" 240 $judge --direction backward $large --tokens 1024 --precision bf16 fp8 \
            --csv "$out/backward_shapes_ep$ranks.csv"
        $how "channel_ep$ranks" 60 $judge --random 30 --repeat 2 --precision fp8_channel
        $how "fp4_ep$ranks" 60 $judge --random 30 --repeat 2 --precision fp8xmxfp4 bf16xmxfp4 bf16xnvfp4
        $how "fp4_backward_ep$ranks" 120 $judge --direction backward --random 30 --repeat 2 \
            --precision fp8xmxfp4 bf16xmxfp4 bf16xnvfp4
        $how "panels_ep$ranks" 60 $judge --random 30 --repeat 2 --precision fp8xmxfp4 --mean-rows 0
        $how "overload_ep$ranks" 120 $judge --direction step --shape qwen3-30b --tokens 2048 \
            --routing one_expert hot one_rank --csv "$out/overload_ep$ranks.csv"
    }
}

memcheck() { # how
    command -v compute-sanitizer >/dev/null || return 0
    "$1" memcheck 180 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
        "$python" tools/rank_check.py --backend mega --ranks 1 --random 12
}
layers() { # how
    "$1" tests 400 "$python" -m pytest -q -m "gpu or ep" tests
    # shellcheck disable=SC2086
    "$1" soak 300 "$python" tools/soak.py $scenarios --bound 60
    "$1" train_soak 300 "$python" tools/soak.py train --steps 2000 --bound 280
    # shellcheck disable=SC2086
    "$1" train_faults 240 "$python" tools/soak.py $training --bound 100
    "$1" demo_one_rank 240 make --no-print-directory demo
    "$1" demo_staged 120 make --no-print-directory demo ARGS="--steps 200 --compare staged"
}

hosts() { # half of the GPUs each, which meet over NVLink, then over sockets, as far as NCCL is concerned
    local way sockets="NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1" sweep="tools/latency_sweep.py --fake-hosts 2"
    step train_hosts 120 "$python" tools/train_step.py --fake-hosts 2
    # shellcheck disable=SC2086
    step train_hosts_sockets 120 env $sockets "$python" tools/train_step.py --fake-hosts 2 --steps 100
    for way in "" _sockets; do
        # shellcheck disable=SC2086
        step "sweep_hosts$way" 120 env ${way:+$sockets} "$python" $sweep --shape dsv3 qwen3-235b --precision fp8 bf16 \
            --tokens 8192 --samples 6 --backend mega --baseline staged --out "$out" --name "sweep_hosts$way"
    done
}

step compile 300 "$python" -m megamoe.jit --all
if [ "$gpus" -eq 1 ]; then
    memcheck step
    check shared 1 1024
    check shared 2 1024
    if [ "$small" -eq 1 ]; then side_by_side; fi # else these leave too little memory to what follows
    layers shared
    side_by_side
else
    check single 1 1024
    memcheck single
    side_by_side
    CUDA_VISIBLE_DEVICES=0,1 check step 2 1024
    for n in 4 8; do
        [ "$gpus" -lt $n ] || CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((n - 1))) check step $n "8 1024 8192"
    done
    layers shared
    side_by_side
    hosts
fi
step host_cost 120 "$python" tools/host_cost.py --check
step captured 60 "$python" tools/host_cost.py --captured --check
step sweep 120 "$python" tools/latency_sweep.py --shape dsv3 flash qwen3-235b qwen3-30b --precision fp8 bf16 \
    --tokens 8192 --mode both --clock --backend mega --baseline staged gemms --out "$out" --name sweep
step sweep_tokens 120 "$python" tools/latency_sweep.py --shape dsv3 flash qwen3-235b qwen3-30b --precision fp8 bf16 \
    --tokens 8 64 512 1024 --backend mega --out "$out" --name sweep_tokens
step sweep_backward 120 "$python" tools/latency_sweep.py --direction backward --reserve-sms 0 --samples 8 \
    --shape dsv3 flash qwen3-235b qwen3-30b --precision bf16 fp8 --tokens 4096 --backend mega --baseline gemms \
    --out "$out" --name sweep_backward
if "$python" -c 'import nvshmem.core' >/dev/null 2>&1; then # the same calls over a window of its own
    step sweep_nvshmem 60 env MEGAMOE_TRANSPORT=nvshmem NVSHMEM_SYMMETRIC_SIZE=8G "$python" tools/latency_sweep.py \
        --shape dsv3 qwen3-30b --precision fp8 bf16 --tokens 8 1024 8192 --backend mega --out "$out" \
        --name sweep_nvshmem
fi
step sweep_routing 90 "$python" tools/latency_sweep.py --shape qwen3-235b qwen3-30b --precision bf16 fp8 --tokens 4096 \
    --routing uniform skewed hot one_rank --samples 8 --backend mega --baseline staged --out "$out" --name sweep_routing
[ "$gpus" -eq 1 ] || step placement 120 "$python" tools/placement.py --shape qwen3-235b --tokens 4096 --slots 8
step sweep_fp4 60 "$python" tools/latency_sweep.py --shape dsv3 flash --precision fp8xmxfp4 --tokens 8 64 8192 \
    --backend mega --out "$out" --name sweep_fp4
# On one GPU, the local experts of EP4, beside the GEMMs alone, with bytes of DRAM where ncu is.
for direction in forward train backward; do
    step "gemms_$direction" 150 env CUDA_VISIBLE_DEVICES=0 "$python" tools/latency_sweep.py --ranks 1 --dram \
        --shape dsv3 flash qwen3-235b qwen3-30b --local-experts-of 4 --reserve-sms 0 --tokens 4096 8192 \
        --precision bf16 --direction $direction --samples 10 --backend mega --baseline gemms --out "$out" \
        --name "gemms_$direction"
done
step train_hf 200 "$python" tools/train_hf.py --curves "$out/train_hf.png"
step train_curves 300 "$python" tools/train_step.py --steps 300 --seeds 1 2 3 4 --curves "$out/train_curves.png"
step train_sweep 300 "$python" tools/latency_sweep.py --direction step --shape qwen3-30b --tokens 8192 --precision bf16 \
    fp8 --reserve-sms 0 default --backend mega --baseline staged --out "$out" --name train_sweep
step train_sweep_dsv3 200 "$python" tools/latency_sweep.py --direction step --shape dsv3 --tokens 4096 --precision bf16 \
    fp8 --samples 8 --backend mega --baseline staged --out "$out" --name train_sweep_dsv3
! compgen -G "$out/*.failed" >/dev/null
