// The precisions that there are. megamoe/formats/table.py names them for Python.
#pragma once
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/e4m3.cuh"

namespace megamoe {

using Bf16 = Precision<Bf16Rows, Bf16Weights, Bf16Rows>;
using Fp8 = Precision<E4m3Rows, E4m3Weights, E4m3Rows>;

}  // namespace megamoe
