// The kernels of one pass over memory, on fibers; tests/emulate/test_quantize.py. They are written for a GPU
// alone, so here are the words of CUDA that it uses. CTAs run one after the other: their shared memory may be
// a variable.
#include "megamoe/arch/host/entry.h"

#define __shared__ static

namespace {

struct {
    unsigned x, y, z;
} blockIdx, gridDim;
struct {
    struct {
        operator unsigned() const { return static_cast<unsigned>(fibers::current->thread); }
    } x;
} threadIdx;

void __syncthreads() { megamoe::arch::named_sync(0, fibers::current->cta->threads); }
uint32_t __byte_perm(uint32_t lo, uint32_t hi, uint32_t selector) {
    return megamoe::arch::prmt(lo, hi, selector);
}

}  // namespace

#include "megamoe/kernels/dequantize_mxfp4.cuh"
#include "megamoe/kernels/quantize_weights.cuh"
#include "megamoe/kernels/sum_rows.cuh"

template <class Args, void (*kernel)(const Args&)>
int run(const Args* args, const unsigned* grid, uint64_t seed, char* report, size_t report_bytes) {
    gridDim = {grid[0], grid[1], grid[2]};
    int status = 0;
    for (unsigned i = 0; i < grid[0] * grid[1] * grid[2] && status == 0; ++i) {
        blockIdx = {i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]};
        auto entry = [](const void* p) { kernel(*static_cast<const Args*>(p)); };
        std::string text;
        status = fibers::run({entry, {args}, 1, megamoe::quantize_threads, 0, seed + i, 0}, &text);
        report[text.copy(report, report_bytes - 1)] = 0;
    }
    return status;
}

#define MEGAMOE_OF_WEIGHTS(name, Eight)                                                          \
    MEGAMOE_HOST_EXPORT int name(const megamoe::QuantizeWeightsArgs* args, const unsigned* grid, \
                                 uint64_t seed, char* report, size_t report_bytes) {             \
        return run<megamoe::QuantizeWeightsArgs, megamoe::quantize_weights<megamoe::Eight>>(     \
            args, grid, seed, report, report_bytes);                                             \
    }
MEGAMOE_OF_WEIGHTS(quantize, Bf16x8)
MEGAMOE_OF_WEIGHTS(quantize_fp32, Fp32x8)
MEGAMOE_OF_WEIGHTS(transpose, E4m3x8)

MEGAMOE_HOST_EXPORT int quantize_rows(const megamoe::QuantizeRowsArgs* args, const unsigned* grid,
                                      uint64_t seed, char* report, size_t report_bytes) {
    return run<megamoe::QuantizeRowsArgs, megamoe::quantize_rows>(args, grid, seed, report, report_bytes);
}

MEGAMOE_HOST_EXPORT int dequantize_rows(const megamoe::QuantizeRowsArgs* args, const unsigned* grid,
                                        uint64_t seed, char* report, size_t report_bytes) {
    return run<megamoe::QuantizeRowsArgs, megamoe::dequantize_rows>(args, grid, seed, report, report_bytes);
}

MEGAMOE_HOST_EXPORT int dequantize_mxfp4(const megamoe::DequantizeMxfp4Args* args, const unsigned* grid,
                                         uint64_t seed, char* report, size_t report_bytes) {
    return run<megamoe::DequantizeMxfp4Args, megamoe::dequantize_mxfp4>(args, grid, seed, report,
                                                                        report_bytes);
}

MEGAMOE_HOST_EXPORT int sum_rows(const megamoe::SumRowsArgs* args, const unsigned* grid, uint64_t seed,
                                 char* report, size_t report_bytes) {
    return run<megamoe::SumRowsArgs, megamoe::sum_rows_of_hosts>(args, grid, seed, report, report_bytes);
}

MEGAMOE_HOST_EXPORT int copy_tails(const megamoe::CopyTailsArgs* args, const unsigned* grid, uint64_t seed,
                                   char* report, size_t report_bytes) {
    return run<megamoe::CopyTailsArgs, megamoe::copy_tails>(args, grid, seed, report, report_bytes);
}
