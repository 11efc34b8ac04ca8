// Gradients of the biases, beside the weight tiles of the first columns: sums, over an expert's rows, of the
// columns of A, which are in shared memory at that time. db13 = sum dgu, db2 = sum s dy.
#pragma once
#include "megamoe/formats/fragment.cuh"
#include "megamoe/gemm/operands.cuh"

namespace megamoe {

// A warp has 16 of its warpgroup's 64 columns, and a lane two of these in every fourth row. They are always
// summed in that order, so that the bits repeat.
template <class T>
class BiasGradient {
  public:
    MEGAMOE_DEVICE BiasGradient(const Context& ctx, const Tile& tile) {
        out_ = gradient_of(ctx, tile);
        weights_ = T::Blocks::template row_weights<T>(ctx, tile);
        slots_ = tile.slots;
        if (wanted()) ask_for_weights(0);
    }

    // add() and store() may be called only where the gradient is wanted. This adds the slot's 64 rows, from
    // the tile's row 64 * i on. Each lane asked for two of their weights one slot before: loads in this loop
    // made GPT-OSS's backward 2 to 5 % slower (H200, 2026-11-22).
    MEGAMOE_DEVICE void add(int slot, int i) {
        const float s[2] = {next_[0], next_[1]};
        ask_for_weights(i + 1);
        const uint8_t* box = tile_smem<T>().slots[slot].a + math_warpgroup() * box_bytes;
        MEGAMOE_UNROLL
        for (int j = 0; j < warpgroup_rows / rows_at_once; ++j) {
            int r = j * rows_at_once + arch::lane_idx() / lanes;
            uint32_t pair = *reinterpret_cast<const uint32_t*>(box + swizzled(r, 2 * column()));
            float weight = arch::shfl(s[j * rows_at_once / 32], r % 32);
            sum_[0] += weight * arch::bf16_lo(pair);
            sum_[1] += weight * arch::bf16_hi(pair);
        }
        arch::warp_sync();  // before one lane releases the slot for all
    }

    MEGAMOE_DEVICE bool wanted() const { return out_ != nullptr; }

    MEGAMOE_DEVICE void store(const Context& ctx, const Tile& tile) {
        int at = 0, width = 0;
        float* out = place(ctx, tile, out_, math_warpgroup() * warpgroup_rows + column(), &at, &width);
        MEGAMOE_UNROLL
        for (int j = 0; j < 2; ++j) {
            MEGAMOE_UNROLL
            for (int mask = lanes; mask < 32; mask *= 2) sum_[j] += arch::shfl_xor(sum_[j], mask);
            bool here = arch::lane_idx() < lanes && at + j < width;
            arch::put_float(out + j, sum_[j], adds_weight_gradients<T>(ctx), here);
        }
    }

    // Called by one thread, of a poisoned launch.
    static MEGAMOE_DEVICE void lose(const Context& ctx, const Tile& tile) {
        float* bias = gradient_of(ctx, tile);
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < T::Tiling::rows && bias != nullptr; ++i) {
            int at = 0, width = 0;
            float* out = place(ctx, tile, bias, i, &at, &width);
            if (at < width) *out = arch::bf16_hi(0x7fc00000u);  // NaN
        }
    }

  private:
    static constexpr int lanes = 8;  // of a row
    static constexpr int rows_at_once = 32 / lanes;

    // The weights of slot i: of rows lane and 32 + lane.
    MEGAMOE_DEVICE void ask_for_weights(int i) {
        if (i == slots_) return;
        MEGAMOE_UNROLL
        for (int j = 0; j < 2; ++j) next_[j] = T::Blocks::weight(weights_, i, j);
    }
    // db13 or db2, where it is wanted and this tile's to make.
    static MEGAMOE_DEVICE float* gradient_of(const Context& ctx, const Tile& tile) {
        return tile.n == 0 ? gemm_of<T>(ctx.args, tile.gemm).bias : nullptr;
    }
    // Row `row` of the tile, that is, an element of the bias.
    static MEGAMOE_DEVICE float* place(const Context& ctx, const Tile& tile, float* bias, int row, int* at,
                                       int* width) {
        GradientBlock<T> block(ctx.args, tile);
        int planes = tile.gemm == GemmId::dw13 ? w13_planes<T>() : 1;
        *width = gemm_of<T>(ctx.args, tile.gemm).m;
        *at = block.row + row;
        return bias + (int64_t{tile.expert()} * planes + block.plane) * *width + *at;
    }
    static MEGAMOE_DEVICE int column() {
        return ((arch::warp_idx() & 3) * lanes + arch::lane_idx() % lanes) * 2;
    }

    float* out_;
    typename T::Blocks::RowWeights weights_;
    int slots_;
    float next_[2] = {0.0f, 0.0f};  // weights of the next slot's rows
    float sum_[2] = {0.0f, 0.0f};
};

}  // namespace megamoe
