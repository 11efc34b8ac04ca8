// gemm1 of backward if weight gradients multiply e4m3: like activation_gradient.cuh, but it writes no bf16.
// Of each half it writes dgu by row for gemm2, and dgu and hs transposed for the weight gradients. Transposed
// dgu has one scale per column of the block, transposed hs one per 128 columns. Rows after an expert's last
// become zeros, whatever their pre-activations are. A grouped launch, whose rows have no padding, writes the
// same.
#pragma once
#include "megamoe/epilogue/activation_gradient.cuh"
#include "megamoe/epilogue/transposed.cuh"

namespace megamoe {

template <class S, class Activation, class Rows>
struct TransposedGradientEpilogue : ActivationGradientEpilogue<S, Activation, Rows> {
    using Base = ActivationGradientEpilogue<S, Activation, Rows>;
    using Base::columns, Base::gu_planes, Base::inputs, Base::inputs_of_half, Base::pairs,
        Base::pairs_of_slot, Base::slot_columns;
    using typename Base::Dgu;
    static constexpr bool reuses_inputs = false;
    static constexpr int slots_of_half =
        1 + 2 * gu_planes;  // hs, and each plane of dgu by row and transposed

    template <class T>
    static MEGAMOE_DEVICE int slots(const Args&) {
        return 2 * slots_of_half;
    }
    template <class T>
    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        const Args& args = ctx.args;
        int half = slot >= slots_of_half ? 1 : 0, i = slot - half * slots_of_half;
        int width = gemm_of<T>(args, tile.gemm).n, column = tile.n * columns + half * S::half_columns;
        int plane = i > 2 ? 1 : 0;
        constexpr bool in_pool = T::Blocks::in_pool;
        const auto& next = gemm_of<T>(args, GemmId::gemm2);
        if (i % 2 != 0) return {in_pool ? &next.a[plane] : &next.out[plane], column, width};
        int whole = padded_rows(width, scale_group);
        if (i == 0) return {&launch_args<T>(args).hs, column, width, tile.block * whole + column};
        return {gemm_of<T>(args, GemmId::dw13).a + (in_pool ? 0 : 1), column, width,
                (tile.block * gu_planes + plane) * whole + column};
    }

    template <class T, class Output>
    static MEGAMOE_DEVICE void run(Context& ctx, const Tile&, PipelineRing<T>& ring, Output& output,
                                   Sums<T>& sum) {
        const Args& args = ctx.args;
        auto& smem = tile_smem<T>();
        float d_s[2] = {0.0f, 0.0f};
        const Weights s = row_weights<T>(args, current_tile<T>());
        // Loops, as in the other epilogue: of halves, of a half's inputs, of planes. They have no branch on
        // the lane, and the ring is one of their own.
        PipelineRing<T> inputs_ring = ring;
        MEGAMOE_UNROLL
        for (int input = 0; input < inputs; ++input) ring.advance();
        MEGAMOE_UNROLL_BY(1)
        for (int half = 0; half < 2; ++half) {
            uint32_t largest_hs = 0;
            MEGAMOE_UNROLL_BY(1)
            for (int input = 0; input < inputs_of_half; ++input, inputs_ring.advance()) {
                await_slot<T>(ctx, inputs_ring);
                Fragment f;
                auto& slot = smem.slots[inputs_ring.slot()];
                const uint8_t* gates = slot.b[0] + math_warpgroup() * box_bytes;
                const uint8_t* ups = slot.b[1] + math_warpgroup() * box_bytes;
                uint4_t* to = own_vectors(slot.a);
                MEGAMOE_UNROLL_BY(1)
                for (int g0 = 0; g0 < pairs_of_slot; g0 += step) {
                    uint32_t made[gu_planes][2][step], hs[2][2];
                    MEGAMOE_UNROLL
                    for (int g = 0; g < step; ++g) {
                        MEGAMOE_UNROLL
                        for (int i = 0; i < 2; ++i) {
                            int at = swizzled(f.row, 2 * f.column(g0 + g)) + i * 8 * slot_k_bytes;
                            uint32_t gate = *reinterpret_cast<const uint32_t*>(gates + at);
                            uint32_t up =
                                Activation::gated ? *reinterpret_cast<const uint32_t*>(ups + at) : 0;
                            auto pair =
                                Base::differentiate(args, gate, up, &sum[0][4 * g + 2 * i], s.of[i], d_s[i]);
                            MEGAMOE_UNROLL
                            for (int p = 0; p < gu_planes; ++p) made[p][i][g] = pair.dgu[p];
                            hs[g % 2][i] = pair.hs;
                            largest_hs = arch::larger_u16x2(largest_hs, pair.hs & (s.mask(i) & magnitudes));
                        }
                        // There are no registers for these: the thread reads them again.
                        if (g % 2 != 0) to[(g0 + g) / 2 * 32] = {hs[0][0], hs[0][1], hs[1][0], hs[1][1]};
                    }
                    Base::replace_sums(sum[0], made);
                }
            }
            Dgu dgu = Base::dgu_of(sum[0], step);
            if (arch::ballot(s.mask(1) == 0) != 0) clear_rows(dgu, s);
            if constexpr (T::Sums::of_rows) Base::template put_d_s<T>(ctx, current_tile<T>(), d_s, half == 1);
            PipelineRing<T> first = inputs_ring;  // twice around the ring is where it began
            MEGAMOE_UNROLL
            for (int i = inputs_of_half; i < 2 * S::num_slots; ++i) first.advance();
            write_half<T>(ctx, output, dgu, largest_hs, s, first, half);
            MEGAMOE_UNROLL
            for (int i = 0; i < S::sums; ++i) sum[0][i] = sum[1][i];
        }
    }

  private:
    static constexpr int step = pairs_of_slot / 2;
    // Of this thread's rows r and r + 8. Rows behind the expert's last have -0 and become zeros, by masks: a
    // branch on the lane would take descriptors of MMAs out of the uniform registers.
    struct Weights {
        float of[2];
        MEGAMOE_DEVICE uint32_t mask(int i) const {
            return __builtin_bit_cast(uint32_t, of[i]) == 0x80000000u ? 0 : ~0u;
        }
    };
    template <class T>
    static MEGAMOE_DEVICE Weights row_weights(const Args& args, const Tile& tile) {
        const float* weights = own<T>(args).row_weight + row0<T>(tile) + row_of_block();
        if constexpr (T::Blocks::in_pool) return {weights[0], weights[8]};
        Weights s = {-0.0f, -0.0f};
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            if (row_of_block() + 8 * i < rows_used<T>(tile))
                s.of[i] = T::Sums::of_rows ? weights[8 * i] : 1.0f;
        }
        return s;
    }
    // What the warps tell each other of a half, in the memory that they have as movers when no tiles are
    // left; of a grouped launch, in that behind its table: the largest of each column over a warp's 16 rows,
    // and over all rows the inverses of the scales, as pairs of bf16.
    struct OfHalf {
        static constexpr int warps = math_role.num_warps;
        uint32_t largest[warps][gu_planes][S::half_columns / 2], inverse[gu_planes][S::half_columns / 2];
        float largest_hs[warps];
        template <class T>
        static MEGAMOE_DEVICE OfHalf& own(const Context& ctx) {
            static_assert(sizeof(OfHalf) <= warps * 32 * sizeof(ReducerState), "others are movers already");
            static_assert(sizeof(ExpertTable) + 16 + sizeof(OfHalf) <= sizeof(MoverSmem), "it is as large");
            if constexpr (!T::Blocks::in_pool)
                return *reinterpret_cast<OfHalf*>(ctx.smem.experts.column_scales);
            return *reinterpret_cast<OfHalf*>(ctx.smem.movers.reducer + num_transport_warps * 32);
        }
    };

    static MEGAMOE_DEVICE int row_of_block() { return math_warpgroup() * warpgroup_rows + Fragment().row; }
    // Where this lane finds 64 columns of its warp's 16 rows, 16 bytes at a time.
    static MEGAMOE_DEVICE uint4_t* own_vectors(uint8_t* a) {
        return reinterpret_cast<uint4_t*>(a) + math_warp() * (16 * slot_columns / 8) + arch::lane_idx();
    }
    static MEGAMOE_DEVICE void clear_rows(Dgu& dgu, const Weights& s) {
        MEGAMOE_UNROLL
        for (auto& plane : dgu.of) {
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) {
                MEGAMOE_UNROLL
                for (uint32_t& pair : plane[i]) pair &= s.mask(i);
            }
        }
    }

    template <class T, class Output>
    static MEGAMOE_DEVICE void write_half(Context& ctx, Output& output, Dgu& dgu, uint32_t largest_hs,
                                          const Weights& s, PipelineRing<T> inputs_ring, int half) {
        Fragment f;
        OfHalf& shared = OfHalf::template own<T>(ctx);
        uint32_t of_rows[4] = {};  // the largest of each plane's rows r, r + 8
        MEGAMOE_UNROLL
        for (int p = 0; p < gu_planes; ++p)
            find_largest(dgu.of[p], of_rows[2 * p], of_rows[2 * p + 1], shared.largest[math_warp()][p], f);
        E4m3Group group = group_of_lane(dgu, of_rows);
        shared.largest_hs[math_warp()] = largest_of_warp(largest_hs);  // by all lanes
        math_sync();
        scale_columns<T>(ctx, shared, half);
        Tile tile = current_tile<T>();
        float inverse =
            scale_block<T>(ctx, shared.largest_hs, tile.block, tile.n * columns + half * S::half_columns,
                           gemm_of<T>(ctx.args, GemmId::gemm1).n);
        write_hs<T>(ctx, output, inputs_ring, s, arch::pack_bf16x2(inverse, inverse));
        put_scales<T>(ctx, group, half);
        float inverses = group.inverse();
        math_sync();
        MEGAMOE_UNROLL_BY(1)
        for (int p = 0; p < gu_planes; ++p) {
            write_rows(output, dgu.of[0], inverses, p);
            const uint32_t* inverse = shared.inverse[p] + f.quad;
            write_transposed(output, dgu.of[0], [&](int g) { return inverse[4 * g]; });
            next_plane(dgu);
        }
    }
    static MEGAMOE_DEVICE void next_plane(Dgu& dgu) {
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            MEGAMOE_UNROLL
            for (int g = 0; g < pairs; ++g) dgu.of[0][i][g] = dgu.of[gu_planes - 1][i][g];
        }
    }

    // The largest magnitude of each of 128 columns over a warp's 16 rows, to `to`, and of this lane's parts
    // of two rows. At each step lanes halve what columns they have left.
    static MEGAMOE_DEVICE void find_largest(const uint32_t (&v)[2][pairs], uint32_t& top, uint32_t& low,
                                            uint32_t* to, Fragment f) {
        uint32_t m[pairs];
        MEGAMOE_UNROLL
        for (int g = 0; g < pairs; ++g) {
            uint32_t a = v[0][g] & magnitudes, b = v[1][g] & magnitudes;
            top = arch::larger_u16x2(top, a);
            low = arch::larger_u16x2(low, b);
            m[g] = arch::larger_u16x2(a, b);
        }
        int first = halve_lanes<pairs / 2, 16>(m);
        first += halve_lanes<pairs / 4, 8>(m);
        first += halve_lanes<pairs / 8, 4>(m);
        MEGAMOE_UNROLL
        for (int j = 0; j < pairs / 8; ++j) to[(first + j) * 4 + f.quad] = m[j];
    }
    // Of 2 n numbers a lane keeps n, the larger of its own and the other lane's. Returns the first that it
    // keeps.
    template <int n, int mask, int numbers>
    static MEGAMOE_DEVICE int halve_lanes(uint32_t (&m)[numbers]) {
        bool high = (arch::lane_idx() & mask) != 0;
        MEGAMOE_UNROLL
        for (int j = 0; j < n; ++j) {
            uint32_t sent = high ? m[j] : m[j + n], kept = high ? m[j + n] : m[j];
            m[j] = arch::larger_u16x2(kept, arch::shfl_xor(sent, mask));
        }
        return high ? n : 0;
    }
    // Of a quad's four rows, two of each plane, a lane gets the one of its own number. The largest of bf16 is
    // that of unsigned halves, unless there is a NaN, which a group leaves alone.
    static MEGAMOE_DEVICE E4m3Group group_of_lane(const Dgu& dgu, uint32_t (&of_rows)[4]) {
        halve_lanes<2, 2>(of_rows);
        halve_lanes<1, 1>(of_rows);
        E4m3Group own;
        own.include(arch::bf16_lo(of_rows[0]), arch::bf16_hi(of_rows[0]));
        constexpr uint32_t infinity = 0x7f80;
        if (arch::ballot(max_of(of_rows[0] >> 16, of_rows[0] & 0xffff) > infinity) != 0) {
            own = {};
            MEGAMOE_UNROLL
            for (int row = 0; row < 2 * gu_planes; ++row) {
                E4m3Group group;
                MEGAMOE_UNROLL
                for (uint32_t pair : dgu.of[row / 2][row % 2])
                    group.include(arch::bf16_lo(pair), arch::bf16_hi(pair));
                group.template join_lanes<4>();
                own = Fragment().quad == row ? group : own;
            }
        }
        return own;
    }

    // A thread for each column of dgu: its scale over all warps, and the inverse for them.
    template <class T>
    static MEGAMOE_DEVICE void scale_columns(const Context& ctx, OfHalf& shared, int half) {
        int thread = arch::thread_idx() - first_math_warp * 32;
        int plane =
            gu_planes == 1 ? 0 : thread / S::half_columns;  // of one plane, both warpgroups write the same
        int of_half = thread % S::half_columns;
        uint32_t m = 0;
        MEGAMOE_UNROLL
        for (auto& of_warp : shared.largest) m = arch::larger_u16x2(m, of_warp[plane][of_half / 2]);
        E4m3Group group;
        float value = of_half % 2 == 0 ? arch::bf16_lo(m) : arch::bf16_hi(m);
        group.include(value, value);
        PowerOfTwo by(group.amax());
        reinterpret_cast<uint16_t*>(shared.inverse[plane])[of_half] =
            static_cast<uint16_t>(__builtin_bit_cast(uint32_t, by.inverse) >> 16);
        Tile tile = current_tile<T>();
        int width = gemm_of<T>(ctx.args, GemmId::gemm1).n, column = tile.n * columns + half * S::half_columns;
        int64_t first = (int64_t{tile.block} * gu_planes + plane) * padded_rows(width, scale_group) + column;
        arch::put_float(own<T>(ctx.args).dgu_columns_scale + first + of_half, by.scale, false,
                        column < width);
    }
    // Of dgu by row: a lane of a quad has the scale of one of its rows, and divides for it.
    template <class T>
    static MEGAMOE_DEVICE void put_scales(const Context& ctx, const E4m3Group& group, int half) {
        Fragment f;
        float* scales = scales_of_half<T>(ctx, current_tile<T>(), half);
        int64_t of_plane =
            int64_t{ceil_div(gemm_of<T>(ctx.args, GemmId::gemm1).n, scale_group)} * ctx.args.pool_rows;
        bool has = true;
        if constexpr (!T::Blocks::in_pool)
            has = row_of_block() + f.quad % 2 * 8 < rows_used<T>(current_tile<T>());
        arch::put_float(scales + (f.quad < 2 ? 0 : of_plane) + f.row + f.quad % 2 * 8, group.scale(), false,
                        scales != nullptr && f.quad < 2 * gu_planes && has);
    }
    template <class Output>
    static MEGAMOE_DEVICE void write_rows(Output& output, const uint32_t (&v)[2][pairs], float inverses,
                                          int plane) {
        Fragment f;
        uint8_t* box = output.claim();
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            float inverse = arch::shfl(inverses, (arch::lane_idx() & ~3) + 2 * plane + i);
            MEGAMOE_UNROLL
            for (int g = 0; g < pairs; ++g)
                *reinterpret_cast<uint16_t*>(box + swizzled(f.row + 8 * i, f.column(g))) =
                    arch::pack_e4m3x2(arch::bf16_lo(v[i][g]) * inverse, arch::bf16_hi(v[i][g]) * inverse);
        }
        output.hand_over();
    }

    // From the slots of the inputs, which are free then.
    template <class T, class Output>
    static MEGAMOE_DEVICE void write_hs(Context& ctx, Output& output, PipelineRing<T> inputs_ring,
                                        const Weights& s, uint32_t inverse) {
        auto to = output.claim_common(0);
        auto& smem = tile_smem<T>();
        PipelineRing<T> first = inputs_ring;
        int at = transposed_at();
        MEGAMOE_UNROLL
        for (int input = 0; input < inputs_of_half; ++input, inputs_ring.advance()) {
            const uint4_t* from = own_vectors(smem.slots[inputs_ring.slot()].a);
            MEGAMOE_UNROLL
            for (int g = 0; g < slot_columns / 8; g += 4) {
                uint32_t four[4];
                MEGAMOE_UNROLL
                for (int k = 0; k < 2; ++k) {
                    uint4_t v = from[(g / 2 + k) * 32];
                    four[2 * k] = transposed_pairs(v.x & s.mask(0), v.y & s.mask(1), inverse);
                    four[2 * k + 1] = transposed_pairs(v.z & s.mask(0), v.w & s.mask(1), inverse);
                }
                arch::store_transposed(input == 0 ? to.slot : to.beside, at + g * 8 * slot_k_bytes, four);
            }
        }
        output.hand_over_both();  // its fence is for the slots of the inputs, too, which TMA overwrites
        arch::warp_sync();        // all lanes have read
        MEGAMOE_UNROLL
        for (int input = 0; input < inputs_of_half; ++input, first.advance())
            first.release(ctx.mem, smem.pipeline);
    }
};

}  // namespace megamoe
