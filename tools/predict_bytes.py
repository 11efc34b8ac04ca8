#!/usr/bin/env python3
"""Predict what a forward launch reads from DRAM, on a CPU in seconds, to judge a change of the tile order.

    python tools/predict_bytes.py --local-experts-of 4 --shape dsv3 qwen3-30b --tokens 8192 --meet steps rounds

--meet names orders: steps (no pair waits for another), or rounds, then members of Meet (megamoe/launch/meetings.py),
such as rounds,many=6. bench/memory_model/ lists what the model leaves out.
"""

import sys

from command import parser_of

from bench.memory_model.predict import Machine, meet_from, predict, rows_of_experts
from bench.shapes import add_shape_arguments, local_shapes


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_shape_arguments(parser, "dsv3", local=True)
    add("--precision", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    add("--tokens", nargs="+", type=int, default=[8192])
    add("--meet", nargs="+", type=meet_from, default=[None, meet_from("rounds")])
    add("--train", action="store_true", help="save pre-activations, as in training")
    add(
        "--l2-mb",
        type=float,
        default=Machine.l2_mb,
        help="MB of each half of L2 that tiles have",
    )
    add(
        "--speeds",
        type=float,
        default=Machine.speeds,
        help="relative difference in speed between pairs",
    )
    add("--slow", type=float, default=0.0, help="relative delay of one slow pair")
    args = parser.parse_args()
    machine = Machine(l2_mb=args.l2_mb, speeds=args.speeds, slow=args.slow)
    for shape in local_shapes(args):
        for precision in args.precision:
            for tokens in args.tokens:
                rows = rows_of_experts(shape, tokens, machine.seed)
                for meet in args.meet:
                    found = predict(shape, precision, rows, meet, machine, args.train)
                    order = f"rounds,many={meet.many},cycles={meet.cycles}" if meet else "steps"
                    print(f"{shape.name:16}{precision:6}{tokens:6}  {order:26}{found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
