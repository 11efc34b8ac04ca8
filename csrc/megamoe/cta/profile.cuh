// In-kernel timestamps of a variant with Traits::profile: args.profile[cta][80], first each Mark, then each
// TileMark of the CTA's first tiles. Most marks are nanoseconds of %globaltimer. Clock readings give the SM
// clock: (clock_end - clock_start) / (end - start) GHz. Waits are cycles, summed over the launch. Sums and
// marks of tiles stay in shared memory until the end: summed in global memory, they made FP8 8 to 13 %
// slower, and math has few registers.
#pragma once
#include "megamoe/arch/arch.cuh"
#include "megamoe/cta/smem.h"

namespace megamoe {

enum class Mark : int {
    clock_start,
    clock_end,
    start,
    end,
    routed,
    dispatched,
    math_done,
    combined,
    rows_wait,
    h_wait,
    slot_wait,
    staged,
    clock_data,  // at data_done
    data_done,   // math's first tile of weight gradients
    planned,     // the pass's plan
    first_slot,  // math has seen the first slot of the pass filled
    ids_staged,
    routes_seen,  // of every rank
    counted,      // and all CTAs have
    drafted,      // the pass's plan, before its tables
    tabled,       // and its tables, before the grid's barrier
    x_seen,       // dispatch has seen a home's x
    pulled,       // and moved a token, or a slice of it
    y_rows_seen   // reduce has seen the rows of a token
};
static_assert(static_cast<int>(Mark::y_rows_seen) + 1 == num_marks, "all stand before the tiles'");

// Of one tile. Tiles are numbered as the CTA's roles walk them, those that it only loads for its partner too.
enum class TileMark : int {
    asked,       // load_b begins to ask for weights
    rows_seen,   // load_a may ask for rows
    slot_seen,   // math has seen its first slot filled
    multiplied,  // no MMA is left
    finished,    // its epilogue has ended
    published,   // its flag is up
    what         // no time: see Profile::mark()
};
static_assert(static_cast<int>(TileMark::what) + 1 == num_tile_marks, "all of a tile's");

template <class T>
class Profile {
  public:
    static MEGAMOE_DEVICE void begin(const Args& args, Smem& smem) {
        if constexpr (T::profile) {
            if (arch::thread_idx() != 0) return;
            for (int i = 0; i < num_wait_marks; ++i) smem.waits[i] = 0;
            for (int i = 0; i < num_warps; ++i) smem.tiles_begun[i] = 0;
            for (auto& tile : smem.tile_marks) {
                for (uint32_t& mark : tile) mark = 0;
            }
            at(args, Mark::clock_start) = arch::clock_cycles();
            at(args, Mark::start) = arch::globaltimer_ns();
        }
    }
    // Adds the cycles spent in `body` to the mark, in the thread for which `mine` holds. Nothing is held in a
    // register meanwhile, since FP8 math has none left.
    template <class Mine, class Body>
    static MEGAMOE_DEVICE void timed(Smem& smem, Mark m, Mine mine, Body body) {
        if constexpr (T::profile) {
            uint32_t now = static_cast<uint32_t>(arch::clock_cycles());
            if (mine()) arch::count_shared(wait(smem, m), -now);
        }
        body();
        if constexpr (T::profile) {
            uint32_t now = static_cast<uint32_t>(arch::clock_cycles());
            if (mine()) arch::count_shared(wait(smem, m), now);
        }
    }
    // One thread of a role marks: lane 0 of any warp; a later warp overwrites an earlier one.
    static MEGAMOE_DEVICE void mark(const Args& args, Mark m) {
        if constexpr (T::profile) {
            if (arch::lane_idx() != 0) return;
            if (m == Mark::data_done) at(args, Mark::clock_data) = arch::clock_cycles();
            at(args, m) = arch::globaltimer_ns();
        }
    }
    // This warp begins its next tile.
    static MEGAMOE_DEVICE void begin_tile(Smem& smem) {
        if constexpr (T::profile) {
            uint8_t& begun = smem.tiles_begun[own_warp()];
            if (arch::lane_idx() == 0 && begun <= num_marked_tiles) ++begun;
        }
    }
    // Marks this warp's tile, if it is one of the first.
    static MEGAMOE_DEVICE void mark(Smem& smem, TileMark m) {
        if constexpr (T::profile) put(smem, m, static_cast<uint32_t>(arch::globaltimer_ns()));
    }
    // The tile's rows, 0 for one of the partner alone, and its GEMM.
    static MEGAMOE_DEVICE void mark(Smem& smem, const Tile& tile) {
        if constexpr (T::profile)
            put(smem, TileMark::what,
                static_cast<uint32_t>((tile.absent() ? 0 : tile.rows()) << 8 | static_cast<int>(tile.gemm)));
    }
    static MEGAMOE_DEVICE void end(const Args& args, const Smem& smem) {
        if constexpr (T::profile) {
            if (arch::thread_idx() != 0) return;
            at(args, Mark::clock_end) = arch::clock_cycles();
            at(args, Mark::end) = arch::globaltimer_ns();
            for (int i = 0; i < num_wait_marks; ++i)
                at(args, static_cast<Mark>(first_wait + i)) = smem.waits[i];
            uint64_t start = at(args, Mark::start), *to = &at(args, Mark::clock_start) + num_marks;
            for (int i = 0; i < num_marked_tiles; ++i) {
                for (int m = 0; m < num_tile_marks; ++m) {
                    uint32_t v = smem.tile_marks[i][m];
                    bool is_time = m != static_cast<int>(TileMark::what);
                    *to++ = is_time && v != 0 ? start + (v - static_cast<uint32_t>(start)) : v;
                }
            }
        }
    }

  private:
    static constexpr int first_wait = static_cast<int>(Mark::rows_wait);
    static MEGAMOE_DEVICE uint32_t* wait(Smem& smem, Mark m) {
        return &smem.waits[static_cast<int>(m) - first_wait];
    }
    static MEGAMOE_DEVICE uint64_t& at(const Args& args, Mark m) {
        return args.profile[int64_t{num_profile_words} * arch::block_idx() + static_cast<int>(m)];
    }
    // Not warp_idx(), which takes all lanes: one lane alone loads.
    static MEGAMOE_DEVICE int own_warp() { return arch::thread_idx() / 32; }
    static MEGAMOE_DEVICE void put(Smem& smem, TileMark m, uint32_t v) {
        uint32_t tile = smem.tiles_begun[own_warp()] - 1u;
        if (arch::lane_idx() == 0 && tile < num_marked_tiles) smem.tile_marks[tile][static_cast<int>(m)] = v;
    }
};

}  // namespace megamoe
