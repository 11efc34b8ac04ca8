// Few tokens over several ranks (rows/push.cuh): words that are their own flags, the way that all ranks find
// alike, and partials that no grid barrier stands before. Epochs count from 1.
#include "scenarios.h"

namespace model {
namespace {

constexpr uint32_t most = 64;  // tokens of a rank in a launch of few tokens

// (a) A word in two parities, read by a CTA of rank 1 that owes rank 0 nothing; another CTA of it sends and
// awaits the route cells. Rank 0 is one thread. `slot` is the word's memory, and `handed_over` orders its
// reads behind its writes, as the word does that carries its value: what is left to show is that no write
// comes too soon.
void pushed_words(World& w, const Flaw& flaw) {
    uint32_t parities = flaw("one parity") ? 1 : 2;
    bool waits = !flaw("a launch ends without the route cells of all");
    std::array<int, 2> word, slot, handed_over, epoch_cell0, epoch_cell1;
    int tokens = w.cell("route_tokens"), hash = w.cell("route_hash");
    for (int p = 0; p < 2; ++p) {
        word[p] = w.cell(name_of("word", p)), slot[p] = w.payload(name_of("slot", p));
        handed_over[p] = w.cell(name_of("handed_over", p));
        epoch_cell0[p] = w.cell(name_of("route_epoch_of_0", p));
        epoch_cell1[p] = w.cell(name_of("route_epoch_of_1", p));
    }
    std::array<int, 2> launch = {w.barrier("launch boundary", 2), w.barrier("launch boundary", 2)};
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            uint32_t p = epoch % parities;
            m.write(slot[p], epoch);
            m.Memory::store(handed_over[p], epoch, Order::release, Scope::system);
            WordPushed::publish(m, word[p], epoch, 30 + epoch);
            m.Memory::store(epoch_cell0[p], epoch, Order::release, Scope::system);
            if (waits) RoutesReady::await(m, epoch_cell1[p], epoch, 1);
        }
    });
    w.thread("deal@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            uint32_t p = epoch % parities;
            uint64_t seen = 0;
            m.poll([&] {
                seen = WordPushed::look(m, word[p]);
                return WordPushed::is_of(seen, epoch);
            });
            m.expect(static_cast<uint32_t>(seen), 30 + epoch, "the word");
            m.poll([&] { return m.Memory::load(handed_over[p], Order::acquire, Scope::system) == epoch; });
            m.read(slot[p], epoch);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
    w.thread("exchange@1", 1, 1, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            uint32_t p = epoch % parities;
            RoutesReady::publish(m, epoch_cell1[p], tokens, hash, epoch, 1, 77);
            m.Memory::await(epoch_cell0[p], Until::equal, epoch, Scope::system, {});
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
}

// (c) Partials in one buffer: a mover of rank 1 writes them behind an mbarrier of its CTA, at which the warp
// arrives that has acquired rank 0's route cell.
void pushed_partials(World& w, const Flaw& flaw) {
    int partial = w.payload("partial"), ready = w.cell("partial_ready"), epoch_cell = w.cell("route_epoch");
    int tokens = w.cell("route_tokens"), hash = w.cell("route_hash");
    std::array<int, 2> launch = {w.barrier("launch boundary", 2), w.barrier("launch boundary", 2)};
    std::array<int, 3> all_begun;
    for (int i = 0; i < 3; ++i) all_begun[i] = w.barrier(name_of("all_begun", i), 1);
    bool early = flaw("movers do not wait for all_begun"), first = flaw("all_begun before the route cell");
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            RoutesReady::publish(m, epoch_cell, tokens, hash, epoch, 1, 77);
            m.poll([&] { return PartialsReady::ready(m, ready, epoch); });
            m.read(partial, epoch);
        }
    });
    w.thread("exchange@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            if (first) m.arrive(all_begun[epoch - 1]);
            RoutesReady::await(m, epoch_cell, epoch, 0);
            if (!first) m.arrive(all_begun[epoch - 1]);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
    w.thread("mover@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            if (!early) m.wait(all_begun[epoch - 1]);
            m.write(partial, epoch);
            PartialsReady::publish(m, ready, epoch);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
}

// (b) x in one buffer and one cell, pushed by rank 0 while the gather of rank 1 may be in the launch before:
// it owes a partial, which another CTA publishes when gather's rows have become it.
void pushed_x(World& w, const Flaw& flaw) {
    int x = w.payload("x"), ready = w.cell("x_ready"), partial = w.cell("partial_ready"), done = w.cell("h");
    bool owes = !flaw("pushed to a rank that owes nothing"),
         chained = !flaw("the partial is published without regard to the rows");
    std::array<int, 2> launch = {w.barrier("launch boundary", 2), w.barrier("launch boundary", 2)};
    w.thread("stage@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            m.write(x, epoch);
            XReady::publish(m, ready, epoch);
            if (owes) m.poll([&] { return PartialsReady::ready(m, partial, epoch); });
        }
    });
    w.thread("gather@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            XReady::await(m, ready, epoch, 0);
            m.read(x, epoch);
            HReady::publish(m, done);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
    w.thread("mover@1", 1, 1, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            if (chained) HReady::await(m, done, epoch, 0);
            if (owes) PartialsReady::publish(m, partial, epoch);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
}

// Ranks 0 and 1 have few tokens, rank 2 may be in another kind of launch, without a count: all find the same.
// A rank with few looks for a peer's count and for its route cell, again and again: here one look may come
// too soon. It publishes its own route cell when it has found out.
template <bool many>
void same_way(World& w, const Flaw& flaw) {
    bool hasty = flaw("no second look at the count"), late = flaw("the route cell before the count");
    constexpr int ranks = 3;
    constexpr uint32_t epoch = 1;
    std::array<int, ranks> count, epoch_cell, tokens, hash;
    for (int r = 0; r < ranks; ++r) {
        count[r] = w.cell(name_of("count", r)), epoch_cell[r] = w.cell(name_of("route_epoch", r));
        tokens[r] = w.cell(name_of("route_tokens", r)), hash[r] = w.cell(name_of("route_hash", r));
    }
    for (int r = 0; r < ranks; ++r) {
        w.thread(name_of("rank", r), r, 0, [=](Mem& m) {
            bool is_few = !many || r != 2, all_few = is_few;
            auto publish = [&] { RoutesReady::publish(m, epoch_cell[r], tokens[r], hash[r], epoch, 8, 77); };
            if (late && is_few) publish();
            if (is_few) WordPushed::publish(m, count[r], epoch, 8);
            for (int peer = 0; peer < ranks && is_few; ++peer) {
                auto counted = [&] { return WordPushed::is_of(WordPushed::look(m, count[peer]), epoch); };
                auto begun = [&] { return m.load(epoch_cell[peer], Order::acquire, Scope::system) == epoch; };
                if (counted()) continue;
                if (!begun()) {
                    if (!many || peer != 2) {
                        m.poll(counted);
                        continue;
                    }
                    m.poll(begun);
                }
                all_few = all_few && !hasty && counted();
            }
            m.expect(all_few, !many, "that all have few");
            if (!late || !is_few) publish();
        });
    }
}

constexpr const char *counts = "the counts are enough here", *no_count = "there is no count to be missed",
                     *a_number = "how many few are is not asked here";

}  // namespace

const std::vector<Scenario> push_scenarios = {
    {"few tokens pushed: words in two parities",
     pushed_words,
     {"one parity", "a launch ends without the route cells of all"},
     {{" at route_hash", not_read}, {" at route_tokens", not_read}}},
    {"few tokens pushed: partials behind all_begun",
     pushed_partials,
     {"movers do not wait for all_begun", "all_begun before the route cell"},
     {{" at route_hash", not_read}, {" at route_tokens", not_read}}},
    {"few tokens pushed: x in one buffer",
     pushed_x,
     {"pushed to a rank that owes nothing", "the partial is published without regard to the rows"},
     {{"fence_proxy_async dropped at h", no_tma}, {"async_complete dropped at gather", no_bulk_stores}}},
    {"few tokens pushed: all have few",
     same_way<false>,
     {"no second look at the count", "the route cell before the count"},
     {{" at route_hash", not_read},
      {" at route_tokens", not_read},
      {"value + 1 at count", a_number},
      {"store dropped at route_epoch", counts},
      {"value + 1 at route_epoch", counts},
      {"value - 1 at route_epoch", counts}}},
    {"few tokens pushed: a rank has more",
     same_way<true>,
     {},
     {{" at route_hash", not_read},
      {" at route_tokens", not_read},
      {"value + 1 at count", a_number},
      {"acquire->relaxed at route_epoch", no_count},
      {"release->relaxed at route_epoch", no_count}}},
};

}  // namespace model
