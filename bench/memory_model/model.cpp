// What the tiles of a forward launch read from DRAM: pairs of CTAs walk their units in the order of
// schedule/order.h, slot by slot, through an L2 that forgets what was used longest ago. Time is in us, events
// are requests for pipeline slots. bench/memory_model/predict.py compiles and calls it, and says what it
// leaves out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <queue>
#include <random>
#include <unordered_map>
#include <vector>

#include "megamoe/protocol/edges.h"
#include "megamoe/schedule/order.h"

using namespace megamoe;

namespace {

constexpr int block_rows = 128, tile_columns = 256;
constexpr double granule_bytes = 16384;  // of a slot: 128 bytes of K of 128 rows or columns

struct Machine {  // read by ctypes
    int32_t pairs;
    double l2_bytes;  // of one half; half of each granule is at home in either
    double dram_gb_per_s;
    double slot_us;   // that MMAs take for a slot
    double tile_us;   // and between two units
    double speeds;    // of pairs: standard deviation, relative
    double noise_us;  // of a unit
    double start_us;  // between the first and the last pair that begins
    double us_per_cycle;
    double slow;  // how much longer than others the first pair takes for a slot, relative
};
struct Launch {
    int32_t num_experts, tiles1, tiles2, slots1, slots2;
    int32_t rounds;  // units of gemm2 that last as long as one of gemm1
    int32_t saves;   // are pre-activations written, too?
    int32_t seed;
    Meet meet;  // rows: 0, or how pairs meet
};
struct Result {
    double read_bytes, demand_bytes, us, spread_us;
    int32_t met, missed;
};

// Each half of L2 has its copy of what its SMs read; what is at home in the other half is kept there, too.
class Cache {
  public:
    explicit Cache(size_t most) : most_(most) {}
    bool touch(uint64_t key) {
        auto found = places_.find(key);
        if (found == places_.end()) return false;
        used_.splice(used_.begin(), used_, found->second);
        return true;
    }
    void put(uint64_t key) {
        if (touch(key)) return;
        if (places_.size() >= most_) places_.erase(used_.back()), used_.pop_back();
        used_.push_front(key);
        places_[key] = used_.begin();
    }

  private:
    size_t most_;
    std::list<uint64_t> used_;
    std::unordered_map<uint64_t, std::list<uint64_t>::iterator> places_;
};

struct PairUnit {
    bool first_gemm;
    UnitTile tile[pair_ctas];
    int expert, rows;  // rows: of the last block, where the pair shares A
    int64_t meeting;   // key
    int comers;        // fewer than 2: nobody meets
    int round;
};

// The units of every pair, as roles/scheduler.cuh has them in forward.
std::vector<std::vector<PairUnit>> units_of_pairs(const Machine& m, const Launch& l, const int32_t* rows) {
    std::vector<Run> runs;
    std::vector<int> experts, last_rows;
    for (int e = 0; e < l.num_experts; ++e) {
        int first = static_cast<int>(runs.size()), blocks = ceil_div(rows[e], block_rows);
        for (int i = 0; i < blocks; ++i) {
            runs.push_back(run_of(first, blocks, first + i));
            experts.push_back(e);
            last_rows.push_back(min_of(block_rows, rows[e] - i * block_rows));
        }
    }
    int blocks = static_cast<int>(runs.size()), units1 = units_of(l.tiles1), units2 = units_of(l.tiles2);
    bool meets = l.meet.rows != 0;
    int span = max_of(ceil_div(2 * pair_ctas * m.pairs, l.tiles1), max_run);
    UnitStream all(blocks, units1, units2, 0, span, 0, m.pairs);
    Gemm2Shares shares(blocks * units1, l.rounds, m.pairs,
                       meets ? all.rounds_before_last(m.pairs) * m.pairs : 0);
    std::vector<std::vector<PairUnit>> found(m.pairs);
    for (int pair = 0; pair < m.pairs; ++pair) {
        UnitStream stream(blocks, units1, units2, 0, span, pair, m.pairs);
        int from_last = m.pairs - 1 - pair;
        stream.next2 = shares.first(from_last);
        while (!stream.done()) {
            Unit unit = stream.pop(
                [&](GemmId id, int begun) {
                    return id == GemmId::gemm2 ? shares.behind(begun, from_last, m.pairs) : begun + m.pairs;
                },
                [&] {
                    return meets ? stream.by_rounds(shares.round_of(stream.next2, m.pairs), m.pairs)
                                 : stream.by_steps();
                });
            Position p = unit.position(units1, units2);
            bool is1 = p.gemm == GemmId::gemm1;
            int tiles = is1 ? l.tiles1 : l.tiles2;
            PairUnit u = {is1, {}, experts[p.portion], 0, 0, 0, unit.number() / m.pairs};
            LastBlock last = meets ? LastBlock::beside : LastBlock::behind;
            if (!unit_in_run(runs[p.portion], p, tiles, last, 0, &u.tile[0])) continue;
            unit_in_run(runs[p.portion], p, tiles, last, 1, &u.tile[1]);
            u.rows = last_rows[u.tile[0].block];
            if (meets && is1) {
                Round round = Round::of(unit.number(), m.pairs);
                Meeting meeting = meeting_of(runs[p.portion], p, tiles, l.meet.many, round);
                u.meeting = meeting.first, u.comers = meeting.pairs;
            }
            found[pair].push_back(u);
        }
    }
    return found;
}

class Simulation {
  public:
    Simulation(const Machine& m, const Launch& l, const int32_t* rows, int num_blocks)
        : m_(m),
          l_(l),
          units_(units_of_pairs(m, l, rows)),
          half_{cache(m), cache(m)},
          random_(l.seed + 1),
          done_(num_blocks, 0),
          done_at_(num_blocks, 0) {}

    Result run() {
        std::vector<Walk> walks(m_.pairs);
        using Event = std::pair<double, int>;
        std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
        for (int p = 0; p < m_.pairs; ++p) {
            walks[p].speed = 1 + m_.speeds * normal_(random_);
            if (p == 0) walks[p].speed += m_.slow;
            walks[p].half = static_cast<int>(random_() % 2);
            events.push({std::abs(normal_(random_)) * m_.start_us, p});
        }
        while (!events.empty()) {
            auto [now, p] = events.top();
            events.pop();
            if (walks[p].unit >= units_[p].size()) continue;
            events.push({step(walks[p], units_[p][walks[p].unit], now), p});
        }
        std::vector<double> spread;
        for (const Round& r : rounds_) spread.push_back(r.last - r.first);
        std::sort(spread.begin(), spread.end());
        result_.spread_us = spread.empty() ? 0 : spread[spread.size() / 2];
        return result_;
    }

  private:
    struct Walk {  // of a pair
        size_t unit = 0;
        int slot = 0, half = 0, patience = InStep::patience;
        double speed = 1, computed[3] = {0, 0, 0}, began = -1;
    };
    struct Round {
        double first = 1e30, last = 0;
    };

    static Cache cache(const Machine& m) {
        return Cache(static_cast<size_t>(m.l2_bytes / (granule_bytes / 2)));
    }

    // Asks for the pair's next slot, if it may; returns when to look at the pair again.
    double step(Walk& w, const PairUnit& u, double now) {
        int slots = u.first_gemm ? l_.slots1 : l_.slots2;
        bool shares_a = u.tile[0].shared == Shared::a;
        if (w.slot == 0) {
            if (w.began < 0) begin(w, u, now);
            if (u.comers > 1 && w.patience > 0 && came_[u.meeting] < u.comers &&
                now < w.began + l_.meet.cycles * m_.us_per_cycle * slots)
                return now + 0.2;
            if (!u.first_gemm)
                for (const UnitTile& t : u.tile)
                    if (done_[t.block] < l_.tiles1 || done_at_[t.block] > now) return now + 0.3;
            if (u.comers > 1 && w.patience > 0) {
                bool met = came_[u.meeting] >= u.comers;
                ++(met ? result_.met : result_.missed);
                w.patience = InStep::patience_behind(w.patience, met);
            }
        }
        double missing = read(w, u, shares_a), ready = now + 0.8;
        result_.read_bytes += missing;
        if (missing > 0) {
            dram_ = max_of(dram_, now) + missing / (m_.dram_gb_per_s * 1e3);
            ready = max_of(ready + 0.5, dram_ + 0.9);
        }
        double length = m_.slot_us * w.speed * (shares_a && u.rows <= block_rows / 2 ? 0.7 : 1);
        double end = max_of(w.computed[2], ready) + length;
        if (w.slot == slots - 1) end += m_.tile_us + std::abs(m_.noise_us * normal_(random_));
        w.computed[0] = w.computed[1], w.computed[1] = w.computed[2], w.computed[2] = end;
        result_.us = max_of(result_.us, end);
        if (++w.slot == slots) {
            write(u, end);
            w.slot = 0, w.began = -1, ++w.unit;
        }
        return max_of(now + 1e-3, w.computed[0]);  // three slots are under way
    }

    void begin(Walk& w, const PairUnit& u, double now) {
        w.began = now;
        if (u.comers > 1) ++came_[u.meeting];
        if (!u.first_gemm) return;
        if (static_cast<int>(rounds_.size()) <= u.round) rounds_.resize(u.round + 1);
        rounds_[u.round] = {min_of(rounds_[u.round].first, now), max_of(rounds_[u.round].last, now)};
    }

    // Bytes that L2 does not have of a slot of both CTAs.
    double read(const Walk& w, const PairUnit& u, bool shares_a) {
        uint64_t gemm = uint64_t{u.first_gemm} << 60, slot = static_cast<uint64_t>(w.slot);
        double missing = 0;
        for (int member = 0; member < (shares_a ? 1 : 2); ++member) {
            double of_block = shares_a ? u.rows / static_cast<double>(block_rows) : 1;
            missing +=
                of_block * get(w.half, gemm | 1ull << 58 | uint64_t(u.tile[member].block) << 24 | slot);
        }
        int tiles = u.first_gemm ? l_.tiles1 : l_.tiles2;
        for (int member = 0; member < (shares_a ? 2 : 1); ++member) {
            if (u.tile[member].n >= tiles) continue;
            for (int half = 0; half < 2; ++half)
                missing += get(w.half, gemm | uint64_t(u.expert) << 40 |
                                           uint64_t(u.tile[member].n * 2 + half) << 24 | slot);
        }
        return missing;
    }
    double get(int half, uint64_t key) {
        double missing = 0;
        for (int home = 0; home < 2; ++home) {
            uint64_t part = key * 2 + home;
            if (home != half && half_[half].touch(part)) continue;
            if (!half_[home].touch(part)) missing += granule_bytes / 2, half_[home].put(part);
            if (home != half) half_[half].put(part);
        }
        result_.demand_bytes += granule_bytes;
        return missing;
    }

    // A unit's outputs take room in L2; h is found there by gemm2.
    void write(const PairUnit& u, double end) {
        int tiles = u.first_gemm ? l_.tiles1 : l_.tiles2;
        for (const UnitTile& t : u.tile) {
            if (t.n >= tiles) continue;
            uint64_t block = uint64_t(t.block) << 24;
            // h of a gated gemm1 has half of the tile's columns, gu and y_rows all; in BF16 256 columns are 4
            // granules.
            int of_h = max_of(1, l_.slots2 / l_.tiles1);
            for (int i = 0; i < (u.first_gemm ? of_h : 4); ++i)
                put(u.first_gemm ? 1ull << 58 | block | uint64_t(t.n * of_h + i)
                                 : 3ull << 60 | block | uint64_t(t.n * 4 + i));
            for (int i = 0; i < 4 && u.first_gemm && l_.saves; ++i)
                put(2ull << 60 | block | uint64_t(t.n * 4 + i));
            if (!u.first_gemm) continue;
            ++done_[t.block];
            done_at_[t.block] = max_of(done_at_[t.block], end + 2);
        }
    }
    void put(uint64_t key) {
        for (int home = 0; home < 2; ++home) half_[home].put(key * 2 + home);
    }

    const Machine m_;
    const Launch l_;
    const std::vector<std::vector<PairUnit>> units_;
    Cache half_[2];
    std::mt19937 random_;
    std::normal_distribution<double> normal_{0, 1};
    std::vector<int> done_;
    std::vector<double> done_at_;
    std::unordered_map<int64_t, int> came_;
    std::vector<Round> rounds_;
    double dram_ = 0;
    Result result_ = {};
};

}  // namespace

// rows: of each expert.
extern "C" void simulate(const Machine* machine, const Launch* launch, const int32_t* rows, Result* out) {
    int blocks = 0;
    for (int e = 0; e < launch->num_experts; ++e) blocks += ceil_div(rows[e], block_rows);
    *out = Simulation(*machine, *launch, rows, blocks).run();
}
