// Gradients of the biases: sums, over an expert's rows, of the columns of A. The weight tiles of the first
// columns compute them while A is in shared memory. db13 = sum dgu, db2 = sum s dy.
#pragma once
#include "megamoe/formats/fragment.cuh"
#include "megamoe/gemm/operands.cuh"

namespace megamoe {

// Where the gradient of a tile's bias goes.
template <class T>
class BiasOfTile {
  public:
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

  protected:
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
};

// What goes on beside the slots of a tile whose bias has a gradient: operator() and store() are called only
// where it is wanted. They always sum in one order, so that the bits repeat.
template <class T, bool transposed = T::WeightTiles::transposed>
class BiasGradient;

// A warp has 16 of its warpgroup's 64 columns, and a lane two of these in every fourth row.
template <class T>
class BiasGradient<T, false> : public BiasOfTile<T> {
    using Base = BiasOfTile<T>;

  public:
    MEGAMOE_DEVICE BiasGradient(const Context& ctx, const Tile& tile) {
        out_ = Base::gradient_of(ctx, tile);
        weights_ = T::Blocks::template row_weights<T>(ctx, tile);
        slots_ = tile.slots;
        if (wanted()) ask_for_weights(0);
    }

    // Adds the slot's 64 rows, from the tile's row 64 * i on. Each lane asked for two of their weights one
    // slot before: loads in this loop made GPT-OSS's backward 2 to 5 % slower (H200, 2026-11-22).
    MEGAMOE_DEVICE void operator()(int slot, int i) {
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
        float* out = Base::place(ctx, tile, out_, math_warpgroup() * warpgroup_rows + column(), &at, &width);
        MEGAMOE_UNROLL
        for (int j = 0; j < 2; ++j) {
            MEGAMOE_UNROLL
            for (int mask = lanes; mask < 32; mask *= 2) sum_[j] += arch::shfl_xor(sum_[j], mask);
            bool here = arch::lane_idx() < lanes && at + j < width;
            arch::put_float(out + j, sum_[j], adds_weight_gradients<T>(ctx), here);
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
    static MEGAMOE_DEVICE int column() {
        return ((arch::warp_idx() & 3) * lanes + arch::lane_idx() % lanes) * 2;
    }

    float* out_;
    typename T::Blocks::RowWeights weights_;
    int slots_;
    float next_[2] = {0.0f, 0.0f};  // weights of the next slot's rows
    float sum_[2] = {0.0f, 0.0f};
};

// The same of a transposed A: a slot is 128 rows, in the order of rows/transpose.cuh. Two lanes have a
// column, 64 rows each. It adds a slot before the slot's MMAs: promoted sums leave no registers beside them.
template <class T>
class BiasGradient<T, true> : public BiasOfTile<T> {
    using Base = BiasOfTile<T>;

  public:
    MEGAMOE_DEVICE BiasGradient(const Context& ctx, const Tile& tile)
        : wanted_(Base::gradient_of(ctx, tile) != nullptr),
          weights_(T::Blocks::template row_weights<T>(ctx, tile)),
          slots_left_(tile.slots) {
        if (wanted()) ask_for_weights();
    }
    MEGAMOE_DEVICE bool wanted() const { return wanted_; }

    MEGAMOE_DEVICE void operator()(int, int) const {}
    template <class Ring>
    MEGAMOE_DEVICE void await(const Ring& ring) {
        const auto& smem = tile_smem<T>();
        int half = arch::lane_idx() % 2, row = math_warpgroup() * warpgroup_rows + column();
        float of_slot = 0.0f;
        MEGAMOE_UNROLL
        for (int c = 0; c < 4; ++c) {
            int at = swizzled(row, 64 * half + 16 * c);
            uint4_t v = *reinterpret_cast<const uint4_t*>(smem.slots[ring.slot()].a + at);
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
            MEGAMOE_UNROLL
            for (int w = 0; w < 4; ++w) {
                float value[4];
                arch::unpack_e4m3x4(words[w], value);
                MEGAMOE_UNROLL
                for (int j = 0; j < 4; ++j) {
                    int of_16 = 2 * w + j / 2 + j % 2 * 8;
                    of_slot += arch::shfl(next_[c], 2 * of_16 + half) * value[j];
                }
            }
        }
        sum_ += smem.a_scale[ring.slot()][row] * of_slot;
        if (--slots_left_ != 0) ask_for_weights();
    }

    MEGAMOE_DEVICE void store(const Context& ctx, const Tile&) {
        const Tile& tile = current_tile<T>();  // asked again: the loop has no registers for it
        int at = 0, width = 0, row = math_warpgroup() * warpgroup_rows + column();
        float* out = Base::place(ctx, tile, Base::gradient_of(ctx, tile), row, &at, &width);
        sum_ += arch::shfl_xor(sum_, 1);
        bool here = arch::lane_idx() % 2 == 0 && at < width;
        arch::put_float(out, sum_, adds_weight_gradients<T>(ctx), here);
    }

  private:
    // The weights of the next slot: lanes 2 r + h have those of row r of each 16 of half h.
    MEGAMOE_DEVICE void ask_for_weights() {
        int lane = arch::lane_idx();
        BlockWeights weights = T::Blocks::next_weights(weights_, T::Tiling::rows);
        MEGAMOE_UNROLL
        for (int c = 0; c < 4; ++c)
            next_[c] = weights.first != nullptr ? weights.first[lane % 2 * warpgroup_rows + 16 * c + lane / 2]
                                                : weights.all;
    }
    static MEGAMOE_DEVICE int column() { return (arch::warp_idx() & 3) * 16 + arch::lane_idx() / 2; }

    bool wanted_;
    typename T::Blocks::RowWeights weights_;
    int slots_left_;
    float next_[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float sum_ = 0.0f;
};

}  // namespace megamoe
