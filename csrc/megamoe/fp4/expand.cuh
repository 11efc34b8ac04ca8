// Idle transport warps expand weights in memory, once for all tiles of an expert in the tall form. The
// patches of a panel are distributed over the warps of all CTAs (fp4/panels.cuh): one per scheduler, because
// work between MMAs costs least when it is spread.
//
// This cannot deadlock. Panels are made in the order in which tiles need them, by warps that wait for
// nothing. So the panel of the first unfinished tile is made already, or all tiles that use its room come
// before it.
#pragma once
#include "megamoe/fp4/format.cuh"
#include "megamoe/fp4/panels.cuh"
#include "megamoe/fp4/steps.cuh"
#include "megamoe/gemm/tiles.cuh"

namespace megamoe {

// The 128 numbers of a row. A warp has eight rows, one for each quad of lanes: a lane takes four words of
// eight numbers, and knows where they go. In the order of QuadWords those of lane q are word q of each 32,
// and make 32 bytes that lie together.
template <class Rows, class Weights>
struct ExpandRow;

template <>
struct ExpandRow<E4m3QuadRows, Mxfp4Weights> {
    using To = ExpandTo<E4m3QuadRows, Mxfp4Weights>;
    static constexpr int words = 4;
    uint32_t codes[words];
    int scales[2];  // two each

    // `from`: this lane's first word; `words_left` in the row from there on; `row_scales`: of its row.
    MEGAMOE_DEVICE void read(const uint8_t* from, int words_left, const uint8_t* row_scales) {
        MEGAMOE_UNROLL
        for (int w = 0; w < words; ++w) {
            codes[w] = 0;
            if (words * w < words_left) codes[w] = *reinterpret_cast<const uint32_t*>(from + 16 * w);
        }
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) scales[i] = read_scales<2>(row_scales + i * 2 * scale_group);
    }
    template <bool all_plain>
    MEGAMOE_DEVICE void write(uint8_t* to, const To::Half& half) const {
        uint32_t out[2][words];
        MEGAMOE_UNROLL
        for (int w = 0; w < words; ++w) {
            const int scale[1] = {scales[w / 2] >> w % 2 * 8 & 0xff};
            To::LookUp look_up[1];
            To::look_ups<all_plain>(look_up, half, scale);
            Codes eight(codes[w]);
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) To::expand(&out[i][w], eight, look_up[0], i);
        }
        auto* vectors = reinterpret_cast<uint4_t*>(to);
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) vectors[i] = {out[i][0], out[i][1], out[i][2], out[i][3]};
    }
};

// 64 rows of one half of a panel's slot: patch number `i` of an expert.
template <class T>
class Patch {
    using B = typename T::Gemm1::B;
    using Row = ExpandRow<typename T::Gemm1::A, B>;

  public:
    MEGAMOE_DEVICE Patch(const Args& args, GemmId id, int expert, int i) {
        constexpr int per_slot = T::Tiling::columns / patch_rows, per_half = per_slot / 2;
        int g = static_cast<int>(id), slots = PanelShape<T>(args, id).slots;
        const auto& gemm = gemm_of<T>(args, id);
        const Expanded& e = launch_args<T>(args).expanded;
        int row = i % per_half * patch_rows, half = i % per_slot / per_half, slot = i / per_slot % slots;
        int panel = i / per_slot / slots;
        Halves<typename T::Tiling> halves = halves_of<T>(id, panel);
        int column = halves.column(half) + row + lane_row(), word = arch::lane_idx() % 4;
        from_ = e.packed[g] + expert * e.expert_bytes[g] + halves.plane(half) * e.plane_bytes[g] +
                column * e.row_bytes[g] + slot * (slot_k_bytes / B::packed) + 4 * word;
        row_bytes_ = static_cast<int>(e.row_bytes[g]);
        rows_ = gemm.n - column;
        words_ = ceil_div(gemm.k - slot * slot_k_bytes, 8) - word;
        typename B::Scales scales(gemm.b_scale, gemm.n, slots, expert, halves);
        block_ = scales.block(half, slot);
        scales_ = block_ + sizeof(ScaleHeader) + 2 * (row + lane_row());
        int64_t to = int64_t{panel_slot<T>(args, id, expert, panel) + slot} * T::Tiling::columns +
                     half * T::Tiling::half_columns + row + lane_row();
        to_ = e.panels + to * slot_k_bytes + 32 * word;
    }

    MEGAMOE_DEVICE void expand() const {
        typename Row::To::Half half(block_);
        if (Row::To::plain(half, {0})) {
            expand_rows<true>(half);
        } else {
            expand_rows<false>(half);
        }
    }

  private:
    static MEGAMOE_DEVICE int lane_row() { return arch::lane_idx() / 4; }
    template <bool all_plain>
    MEGAMOE_DEVICE void expand_rows(const typename Row::To::Half& half) const {
        constexpr int ahead = all_plain ? 2 : 1;  // rows of a lane on their way at once
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < patch_rows; i += 8 * ahead) {
            Row rows[ahead];
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j) {
                int row = i + 8 * j;
                rows[j].read(from_ + row * row_bytes_, row < rows_ ? words_ : 0, scales_ + 2 * row);
            }
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j)
                rows[j].template write<all_plain>(to_ + (i + 8 * j) * slot_k_bytes, half);
        }
    }

    const uint8_t *from_, *block_, *scales_;
    uint8_t* to_;
    int row_bytes_, rows_, words_;
};

// Panels of tiles in the tall form.
template <class T>
struct TallPanels : PanelShape<T> {
    static_assert(expands_slots<T>, "what is expanded in memory is what others expand in slots");
    using PanelShape<T>::PanelShape;
    using Patch = megamoe::Patch<T>;
    static constexpr int least_rows = warpgroup_rows + 1;  // of an expert that has such tiles
    static MEGAMOE_DEVICE bool any() { return has_panels<T>(); }
    static MEGAMOE_DEVICE uint32_t* ready(const Args& args, GemmId id, int expert, int n) {
        return panel_ready<T>(args, id, expert, n);
    }
};

// What a transport warp makes, patch by patch. It never waits; it returns whether there was something to do.
// Panels: what is made, and where it lies: panels of a GEMM's matrix and patches() of each; ready(), their
// counter; Patch, which expand()s.
template <class T, class Panels>
class Expander {
  public:
    static MEGAMOE_DEVICE void begin_pass(const Context& ctx) {
        ExpanderState& s = state();
        if (arch::lane_idx() == 0) {
            s = {};
            int experts = ctx.args.num_local_experts;
            if (!Panels::any()) s.at[0].expert = experts;
            if (!Panels::any() || recomputes<T>(ctx) || only_weights<T>(ctx.args)) s.at[1].expert = experts;
        }
        arch::warp_sync();
    }
    // Are all panels of the pass made?
    static MEGAMOE_DEVICE bool finished(const Context& ctx) {
        if (arch::warp_idx() >= first_math_warp) return true;
        const ExpanderState& s = state();
        int experts = ctx.args.num_local_experts;
        return min_of(s.at[0].expert, s.at[1].expert) >= experts && s.patch >= s.patches;
    }
    // Makes a patch, if its panel's room is free. Must not be called when finished.
    static MEGAMOE_DEVICE bool next(Context& ctx) {
        ExpanderState& s = state();
        if (s.patch >= s.patches && !take(ctx, s)) return false;
        typename Panels::Patch(ctx.args, s.gemm, s.expert, s.patch).expand();
        arch::warp_sync();
        int next = s.patch + num_transports(ctx);
        if (next >= s.patches) publish(ctx, s, next);
        arch::warp_sync();  // all lanes have read
        if (arch::lane_idx() == 0) s.patch = next;
        arch::warp_sync();
        return true;
    }

  private:
    static MEGAMOE_DEVICE ExpanderState& state() { return tile_smem<T>().forms.expander[transport_warp()]; }
    static MEGAMOE_DEVICE int rows_of(const Context& ctx, int expert) {
        const PassPlan& plan = ctx.smem.plan;
        return expert < 0 ? 0 : routes_between(ctx.args, expert, plan.chunk_begin, plan.chunk_end);
    }
    // The next expert and GEMM that have panels, in the order of the first tile of each: UnitStream's, in
    // schedule/order.h. False if there is none, or while tiles that use its room are not done.
    static MEGAMOE_DEVICE bool take(Context& ctx, ExpanderState& s) {
        const Args& args = ctx.args;
        int experts = args.num_local_experts, span = step_blocks<T>(ctx);
        MEGAMOE_UNROLL_BY(1)
        while (min_of(s.at[0].expert, s.at[1].expert) < experts) {
            bool is_first = s.at[0].expert < experts &&
                            (s.at[1].expert >= experts || s.at[0].block / span <= s.at[1].block / span + 1);
            GemmId id = gemm_now<T>(ctx, is_first ? GemmId::gemm1 : GemmId::gemm2);
            ExpandedTo& at = s.at[is_first ? 0 : 1];
            int expert = at.expert, rows = rows_of(ctx, expert);
            int rows_before = rows_of(ctx, expert - launch_args<T>(args).expanded.rooms);
            int blocks_before = ceil_div(rows_before, T::Tiling::rows);
            // This is done for experts without panels, too, since their room may hold those of an earlier
            // one.
            if (!is_free(ctx, id, at.block_before, blocks_before)) return false;
            arch::warp_sync();  // all lanes have read
            if (arch::lane_idx() == 0) {
                at.expert = expert + 1;
                at.block += ceil_div(rows, T::Tiling::rows);
                at.block_before += blocks_before;
            }
            if (rows >= Panels::least_rows) {
                Panels shape(args, id);
                // Which warps make one patch more than others changes from expert to expert.
                int warps = num_transports(ctx), first = transport_index(ctx) + expert * (warps / 3);
                if (arch::lane_idx() == 0) {
                    s.gemm = id;
                    s.expert = expert;
                    s.patch = first % warps;
                    s.patches = shape.panels * shape.patches();
                }
            }
            arch::warp_sync();
            if (s.patch < s.patches) return true;
        }
        return false;
    }
    static MEGAMOE_DEVICE bool is_free(Context& ctx, GemmId id, int block, int blocks) {
        GemmId counted = id == GemmId::recompute ? GemmId::gemm1 : id;
        uint32_t* done = gemm_of<T>(ctx.args, counted).done + block;
        int tiles = Shape<T>::tiles(ctx.args, id);
        bool free = true;
        MEGAMOE_UNROLL_BY(1)
        for (int i = arch::lane_idx(); i < blocks; i += 32)
            free = free && RoomFree::ready(ctx.mem, done + i, tiles);
        return arch::ballot(!free) == 0;
    }
    // Publishes all of an expert's patches at once, since a release waits for the stores before it. `end`:
    // behind the last one.
    static MEGAMOE_DEVICE void publish(Context& ctx, const ExpanderState& s, int end) {
        int warps = num_transports(ctx), of_panel = Panels(ctx.args, s.gemm).patches();
        MEGAMOE_UNROLL_BY(1)
        for (int i = end - warps * (1 + arch::lane_idx()); i >= 0; i -= 32 * warps)
            PanelReady::publish(ctx.mem, Panels::ready(ctx.args, s.gemm, s.expert, i / of_panel));
    }
};

}  // namespace megamoe
