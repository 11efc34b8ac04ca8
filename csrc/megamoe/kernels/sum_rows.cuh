// Sum the results of several hosts for each token into y, in fp32 and in the order of the hosts:
// megamoe/backends/hosts/backend.py.
#pragma once
#include "megamoe/layout/passes.h"
#include "megamoe/rows/vectors.cuh"

namespace megamoe {

constexpr int sum_rows_threads = 256;

// gridDim: T, ceil(H/8/256). A thread has 16 bytes of a row.
MEGAMOE_DEVICE void sum_rows_of_hosts(const SumRowsArgs& args) {
    int vectors = args.columns / 8;
    int vector = static_cast<int>(blockIdx.y * sum_rows_threads + threadIdx.x);
    if (vector >= vectors) return;
    int64_t token = blockIdx.x;
    const auto* rows = static_cast<const uint4_t*>(args.rows) + vector;
    float sum[8] = {};
    for (int i = 0; i < args.num; ++i) {
        int64_t place = args.places[token * args.num + i];
        if (place != 0) add_vector(sum, rows[place * vectors], 1.0f);
    }
    static_cast<uint4_t*>(args.out)[token * vectors + vector] = pack_vector(sum);
}

}  // namespace megamoe
