// Packed weights in backward, which reads them transposed. Transport warps expand the matrices of a few
// experts to bf16 in memory, laid out as dense weights. Tiles load them like BF16's (docs/fp4.md). A room
// holds w2 [H, I] and w13 [P, I, H] of one expert; expert e uses room e % rooms.
#pragma once
#include "megamoe/fp4/expand.cuh"

namespace megamoe {

// The matrix of a GEMM, one panel: a patch is 64 rows of 128 columns.
template <class T, class Weights>
struct Matrices {
    static constexpr int least_rows = 1, panels = 1;
    int planes, rows, columns;
    MEGAMOE_DEVICE Matrices(const Args& args, GemmId id)
        : planes(is_w2(id) ? 1 : w13_planes<T>()),
          rows(is_w2(id) ? args.hidden : args.intermediate),
          columns(is_w2(id) ? args.intermediate : args.hidden) {}
    MEGAMOE_DEVICE int row_blocks() const { return ceil_div(rows, patch_rows); }
    MEGAMOE_DEVICE int groups() const { return ceil_div(columns, scale_group); }
    MEGAMOE_DEVICE int patches() const { return planes * row_blocks() * groups(); }

    static MEGAMOE_DEVICE bool is_w2(GemmId id) { return id == GemmId::gemm1; }
    static MEGAMOE_DEVICE bool any() { return true; }
    static MEGAMOE_DEVICE uint32_t* ready(const Args& args, GemmId id, int expert, int) {
        return launch_args<T>(args).expanded.ready + 2 * expert + (is_w2(id) ? 0 : 1);
    }
    static MEGAMOE_DEVICE int room(const Args& args, int expert) {
        return expert % launch_args<T>(args).expanded.rooms;
    }

    // A warp reads eight rows at once, a lane 32 numbers of one: 4 KB are on their way, for a warp has
    // nothing else to do while they come. Two lanes exchange words of eight numbers, so that both together
    // write the 32 bytes of a sector.
    class Patch {
      public:
        MEGAMOE_DEVICE Patch(const Args& args, GemmId id, int expert, int i) {
            Matrices m(args, id);
            int g = is_w2(id) ? 0 : 1, group = i % m.groups(), first = i / m.groups() % m.row_blocks();
            int plane = i / m.groups() / m.row_blocks(), row = first * patch_rows + arch::lane_idx() / 4;
            int pair = arch::lane_idx() % 4 / 2, column = group * scale_group + pair * 2 * unit;
            const Expanded& e = launch_args<T>(args).expanded;
            row_bytes_ = static_cast<int>(e.row_bytes[g]);
            from_ = e.packed[g] + expert * e.expert_bytes[g] + plane * e.plane_bytes[g] +
                    int64_t{row} * row_bytes_ + (column + odd() * unit) / Weights::packed;
            int64_t blocks = int64_t{expert * m.planes + plane} * ceil_div(m.rows, scale_group);
            int64_t block = (blocks + row / scale_group) * m.groups() + group;
            block_ = reinterpret_cast<const uint8_t*>(gemm_of<T>(args, g == 0 ? id : GemmId::gemm2).b_scale) +
                     block * Weights::block_bytes;
            // [2, 128 rows, scales of 64 numbers]
            scale_ = block_ + sizeof(ScaleHeader) + (pair * scale_group + row % scale_group) * row_scales;
            int64_t plane_numbers = int64_t{m.rows} * m.columns;  // as many as w2 has
            int64_t planes_before = int64_t{room(args, expert)} * (1 + w13_planes<T>()) + g + plane;
            to_ = reinterpret_cast<uint16_t*>(e.panels) + planes_before * plane_numbers +
                  int64_t{row} * m.columns + column + odd() * word;
            columns_ = m.columns;
            MEGAMOE_UNROLL
            for (int u = 0; u < 2; ++u) rows_[u] = column + u * unit < m.columns ? m.rows - row : 0;
        }
        MEGAMOE_DEVICE void expand() const {
            MEGAMOE_UNROLL_BY(1)
            for (int i = 0; i < patch_rows; i += 8 * ahead) {
                Read now;
                read(now, i);
                write(now, i);
            }
        }

      private:
        // Rows of a lane that are read together. More of NVFP4's spill.
        static constexpr int ahead = Weights::scales_sums ? 4 : 8;
        static constexpr int unit = 32, word = 8, row_scales = 2 * unit / Weights::group;
        struct Read {
            uint4_t codes[ahead];
            int scales[ahead];  // of the pair's 64 numbers
        };
        static MEGAMOE_DEVICE int odd() { return arch::lane_idx() % 2; }
        MEGAMOE_DEVICE void read(Read& to, int first) const {
            int rows = odd() != 0 ? rows_[1] : rows_[0];
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j) {
                int row = first + 8 * j;
                to.codes[j] = {0, 0, 0, 0}, to.scales[j] = 0;
                if (row < rows)
                    to.codes[j] = *reinterpret_cast<const uint4_t*>(from_ + int64_t{row} * row_bytes_);
                if (row < rows_[0]) to.scales[j] = read_scales<row_scales>(scale_ + row * row_scales);
            }
        }
        MEGAMOE_DEVICE void write(const Read& from, int first) const {
            float of_sums = reinterpret_cast<const ScaleHeader*>(block_)->of_sums;
            bool is_odd = odd() != 0;
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j) {
                int row = first + 8 * j;
                const uint4_t& v = from.codes[j];
                uint32_t words[2][2];  // the even lane's are 0 and 2 of either unit, the odd one's 1 and 3
                MEGAMOE_UNROLL
                for (int k = 0; k < 2; ++k) {
                    uint32_t even_word = k == 0 ? v.x : v.z, odd_word = k == 0 ? v.y : v.w;
                    uint32_t other = arch::shfl_xor(is_odd ? even_word : odd_word, 1);
                    words[0][k] = is_odd ? other : even_word;
                    words[1][k] = is_odd ? odd_word : other;
                }
                uint16_t* to = to_ + int64_t{row} * columns_;
                MEGAMOE_UNROLL
                for (int u = 0; u < 2; ++u) {
                    MEGAMOE_UNROLL
                    for (int k = 0; k < 2; ++k) {
                        int scale = from.scales[j] >> (u * unit + k * 2 * word) / Weights::group * 8 & 0xff;
                        uint32_t factor = Weights::template factor<false>(scale, 0), out[4];
                        MEGAMOE_UNROLL
                        for (int part = 0; part < 2; ++part)
                            ExpandTo<Bf16Rows, Weights>::expand(out + 2 * part, Codes(words[u][k]), factor,
                                                                part);
                        if constexpr (Weights::scales_sums) {
                            MEGAMOE_UNROLL
                            for (uint32_t& two : out)
                                two = arch::pack_bf16x2(arch::bf16_lo(two) * of_sums,
                                                        arch::bf16_hi(two) * of_sums);
                        }
                        if (row < rows_[u])
                            arch::store_vec(reinterpret_cast<uint4_t*>(to + u * unit + k * 2 * word),
                                            {out[0], out[1], out[2], out[3]});
                    }
                }
            }
        }

        const uint8_t *from_, *block_, *scale_;
        uint16_t* to_;
        int row_bytes_, columns_, rows_[2];  // rows: of either unit, from this lane's first one on
    };
};

// The forms of such a launch: its tiles have one, whose weights lie in rooms.
template <class Weights>
struct InRooms : OneForm {
    template <int num_slots>
    struct Smem {
        ExpanderState expander[num_transport_warps];
    };
    static constexpr bool panels = false;

    template <class T>
    struct Of : OneForm::Of<T> {
        using Panels = Matrices<T, Weights>;
        static constexpr bool in_rooms = true;
        static MEGAMOE_DEVICE int place_of(Context& ctx, const Tile& tile) {
            PanelReady::await(ctx.mem, Panels::ready(ctx.args, tile.gemm, tile.expert(), 0),
                              Panels(ctx.args, tile.gemm).patches(), tile.expert());
            return Panels::room(ctx.args, tile.expert());
        }
        static MEGAMOE_DEVICE void begin_pass(const Context& ctx) { Expander<T, Panels>::begin_pass(ctx); }
        static MEGAMOE_DEVICE bool finished(const Context& ctx) { return Expander<T, Panels>::finished(ctx); }
        static MEGAMOE_DEVICE bool next(Context& ctx) { return Expander<T, Panels>::next(ctx); }
        static MEGAMOE_DEVICE void clear_counters(const Args& args, int expert) {
            if (arch::lane_idx() < 2) launch_args<T>(args).expanded.ready[2 * expert + arch::lane_idx()] = 0;
        }
    };
};

}  // namespace megamoe
