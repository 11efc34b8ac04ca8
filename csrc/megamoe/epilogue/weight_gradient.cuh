// Tiles of dw13 and dw2: bf16 or fp32, written or added. One CTA owns a tile over all rows of the expert in a
// pass. So each element is added to once per pass, and its bits depend on the routing alone. TMA adds:
// reading the old values through the pipeline took 10 % longer (DSv3, fp32, H200, 2026-11-22). Additions run
// at 1.2 TB/s if they miss L2 and at 3.8 if they hit, so the memory is prefetched into L2.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class S>
struct WeightGradientEpilogue {
    static constexpr bool elementwise = false;
    static constexpr int planes = 1, columns = S::columns, inputs = 0;

    // For each slot, and without a division, which takes the thread that stores some 150 clk: math waits for
    // it.
    template <class T>
    static MEGAMOE_DEVICE int slot_columns(const Args& args) {
        return slot_k_bytes >> own<T>(args).dw_bytes / 2;  // 2 or 4 bytes
    }
    template <class T>
    static MEGAMOE_DEVICE int slots(const Args& args) {
        return columns / slot_k_bytes * own<T>(args).dw_bytes;
    }

    template <class T>
    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
        return {gemm.out, tile.n * columns + slot * slot_columns<T>(ctx.args), gemm.n};
    }
    // One thread fetches what the tile will be added to into L2.
    template <class T>
    static MEGAMOE_DEVICE void prefetch(const Context& ctx, const Tile& tile) {
        GradientBlock<T> block(ctx.args, tile);
        MEGAMOE_UNROLL_BY(1)
        for (int c = 0; c < slots<T>(ctx.args); ++c) {
            if (!prefetch_slot<T>(ctx, tile, block, c)) break;
        }
    }
    // An output slot of it; false past the matrix's last column.
    template <class T>
    static MEGAMOE_DEVICE bool prefetch_slot(const Context& ctx, const Tile& tile,
                                             const GradientBlock<T>& block, int c) {
        Destination to = output<T>(ctx, tile, c);
        if (to.column >= to.width) return false;
        MEGAMOE_UNROLL_BY(1)
        for (int row = block.row; row < block.row + S::rows; row += warpgroup_rows) {
            if (row < gemm_of<T>(ctx.args, tile.gemm).m)
                arch::tma_prefetch_4d(to.map, to.column, row, block.plane, tile.expert());
        }
        return true;
    }
    // One thread: 64 rows of the matrix, from `row` of the m-block on.
    template <class T>
    static MEGAMOE_DEVICE void store(const Context& ctx, const Tile& tile, Destination to, int row,
                                     const void* from, bool adds) {
        GradientBlock<T> block(ctx.args, tile);
        row += block.row;
        if (row >= gemm_of<T>(ctx.args, tile.gemm).m) return;
        if (adds) {
            arch::tma_reduce_add_4d(to.map, from, to.column, row, block.plane, tile.expert());
        } else {
            arch::tma_store_4d(to.map, from, to.column, row, block.plane, tile.expert());
        }
    }

    template <class T, class Output>
    static MEGAMOE_DEVICE void run(Context& ctx, const Tile& tile, PipelineRing<T>&, Output& output,
                                   Sums<T>& sum) {
        Fragment f;
        if (own<T>(ctx.args).dw_bytes == 2) {
            write_halves<Bf16Rows, T>(ctx, tile, 2, output, sum, f);
            return;
        }
        MEGAMOE_UNROLL
        for (int half = 0; half < 2; ++half) write_fp32(output, sum[half], f);
    }

  private:
    struct alignas(8) Pair {
        float a, b;
    };
    // One half, 32 columns a slot.
    template <class Output, int n>
    static MEGAMOE_DEVICE void write_fp32(Output& output, const float (&v)[n], Fragment f) {
        constexpr int groups = slot_k_bytes / 4 / 8;  // of 8 columns
        MEGAMOE_UNROLL
        for (int c = 0; c < n / 4 / groups; ++c) {
            uint8_t* box = output.claim();
            MEGAMOE_UNROLL
            for (int g = groups * c; g < groups * (c + 1); ++g) {
                int at = swizzled(f.row, 4 * f.column(g - groups * c));
                *reinterpret_cast<Pair*>(box + at) = {v[4 * g], v[4 * g + 1]};
                *reinterpret_cast<Pair*>(box + at + 8 * slot_k_bytes) = {v[4 * g + 2], v[4 * g + 3]};
            }
            output.hand_over();
        }
    }
};

}  // namespace megamoe
