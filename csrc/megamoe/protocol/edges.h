// Every synchronization between CTAs or ranks, one struct per edge: the producer calls publish(), the
// consumer await() or ready(). A role touches a flag only through an edge, so it cannot forget a fence.
// docs/protocol.md has the happens-before argument of each edge; tests/model checks each with its mutants.
//
// Rules: a producer that wrote through the async proxy first completes its bulk stores. One that wrote with
// ordinary stores converges with all writers (warp_sync, their barrier or an mbarrier) before publish(). A
// consumer that reads through the async proxy fences after its acquire, in the thread that issues the copy.
#pragma once
#include "megamoe/protocol/memory.h"

namespace megamoe {

// home rank -> expert rank: ids and weights of this rank's tokens are staged. Cell: RouteCell::epoch in the
// peer's window.
struct RoutesReady {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell epoch_cell, Cell tokens_cell, Cell hash_cell,
                                       uint32_t epoch, uint32_t num_tokens, uint32_t config_hash) {
        mem.store(tokens_cell, num_tokens, Order::relaxed, Scope::system);
        mem.store(hash_cell, config_hash, Order::relaxed, Scope::system);
        mem.store(epoch_cell, epoch, Order::release, Scope::system);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool await(Mem& mem, Cell epoch_cell, uint32_t epoch, uint32_t peer) {
        return mem.await(epoch_cell, Until::equal, epoch, Scope::system, Wait{Edge::routes_ready, peer, 0});
    }
};

// home rank -> expert rank: x (and its scales) is staged. Read there by ordinary loads.
struct XReady {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell, uint32_t epoch) {
        mem.store(cell, epoch, Order::release, Scope::system);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool await(Mem& mem, Cell cell, uint32_t epoch, uint32_t peer) {
        return mem.await(cell, Until::at_least, epoch, Scope::system, Wait{Edge::x_ready, peer, 0});
    }
};

// home rank -> expert rank, in a launch of few tokens: a count, two ids or a weight, pushed as a word. The
// word is its own flag: its upper half is the epoch. It orders no other memory.
struct WordPushed {
    template <class Mem, class Word>
    static MEGAMOE_DEVICE void publish(Mem& mem, Word word, uint32_t epoch, uint32_t value) {
        mem.store_word(word, uint64_t{epoch} << 32 | value);
    }
    template <class Mem, class Word>
    static MEGAMOE_DEVICE uint64_t look(Mem& mem, Word word) {
        return mem.load_word(word);
    }
    static MEGAMOE_PURE bool is_of(uint64_t seen, uint32_t epoch) { return seen >> 32 == epoch; }
};

// dispatch -> load_a: `rows` rows of a block are in the pool. Ordinary stores -> TMA loads.
struct RowsReady {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell, uint32_t rows) {
        mem.add(cell, rows, Order::release);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool await(Mem& mem, Cell cell, uint32_t rows, uint32_t block) {
        bool ok =
            mem.await(cell, Until::at_least, rows, Scope::gpu, Wait{Edge::rows_ready, max_ranks, block});
        mem.fence_proxy_async();
        return ok;
    }
};

// gemm1 -> load_a (gemm2): tiles of h, by TMA store; their scales, by ordinary stores of the math warps.
struct HReady {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell) {
        mem.async_complete();
        mem.add(cell, 1, Order::release);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool await(Mem& mem, Cell cell, uint32_t tiles, uint32_t block) {
        bool ok = mem.await(cell, Until::at_least, tiles, Scope::gpu, Wait{Edge::h_ready, max_ranks, block});
        mem.fence_proxy_async();
        return ok;
    }
};

// Tests how many tiles of a block are done: a poll, not a wait.
struct TilesDone {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool ready(Mem& mem, Cell done, uint32_t tiles) {
        return mem.load(done, Order::acquire, Scope::gpu) >= tiles;
    }
};

// gemm2 -> reduce: tiles of y_rows, by TMA store. Read by ordinary loads.
struct YRowsReady : TilesDone {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell) {
        mem.async_complete();
        mem.add(cell, 1, Order::release);
    }
};

// expand -> load_b: patches of a panel of weights. Ordinary stores -> TMA loads.
struct PanelReady {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell) {
        mem.add(cell, 1, Order::release);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool await(Mem& mem, Cell cell, uint32_t patches, uint32_t expert) {
        bool ok =
            mem.await(cell, Until::at_least, patches, Scope::gpu, Wait{Edge::panel_ready, max_ranks, expert});
        mem.fence_proxy_async();
        return ok;
    }
};

// The tiles of a block, gemm1's or gemm2's -> expand, which overwrites the panels that they read by TMA.
// Those loads completed on the mbarriers that math awaited, before the tiles were published.
struct RoomFree : TilesDone {};

// gemm1 and restore -> both loaders of weight tiles, once per pass. Each store thread arrives once, after the
// last gemm1 tile of its CTA, and each transport warp after its last row of x. TMA stores (dgu, hs) and
// ordinary stores (rows of x; rows of dy, which some gemm1 tile awaited) -> TMA loads.
struct GradsReady {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell) {
        mem.async_complete();  // a transport warp has nothing to complete
        mem.add(cell, 1, Order::release);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool await(Mem& mem, Cell cell, uint32_t arrivals, uint32_t expert) {
        bool ok = mem.await(cell, Until::at_least, arrivals, Scope::gpu,
                            Wait{Edge::grads_ready, max_ranks, expert});
        mem.fence_proxy_async();
        return ok;
    }
};

// reduce (expert rank) -> combine (home rank): one partial is in the home's window. Ordinary stores into the
// peer's memory; ordinary loads by the home.
struct PartialsReady {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell, uint32_t epoch) {
        mem.store(cell, epoch, Order::release, Scope::system);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool ready(Mem& mem, Cell cell, uint32_t epoch) {
        return mem.load(cell, Order::acquire, Scope::system) == epoch;
    }
};

// All CTAs of this rank. The last to arrive opens the barrier by counting up `generation`. One thread of each
// CTA calls it, after a barrier of the threads whose writes it publishes.
struct GridBarrier {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool arrive_and_wait(Mem& mem, Cell arrivals, Cell generation, uint32_t num_ctas) {
        uint32_t mine = mem.load(generation, Order::relaxed, Scope::gpu);
        if (mem.fetch_add(arrivals, 1) == num_ctas - 1) {
            mem.store(arrivals, 0, Order::relaxed, Scope::gpu);
            mem.store(generation, mine + 1, Order::release, Scope::gpu);
            return true;
        }
        return mem.await(generation, Until::at_least, mine + 1, Scope::gpu,
                         Wait{Edge::grid_barrier, max_ranks, 0});
    }
};

// Pairs of CTAs that share an operand meet before they load it: each arrives and waits for the others, for a
// bounded number of cycles. A meeting only reduces how often memory is read. Results do not depend on it, so
// no operation here orders memory.
struct InStep {
    // A pair loses patience when a meeting times out, and regains it when one does not. Without patience it
    // still arrives, but no longer waits in this pass: pairs that are always late must not delay the others.
    static constexpr int patience = 8;
    static MEGAMOE_PURE int patience_behind(int before, bool met) { return met ? patience : before - 1; }
    // `pairs` come to a cell once each.
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool come(Mem& mem, Cell came, uint32_t pairs, uint32_t cycles) {
        mem.add(came, 1, Order::relaxed);
        return mem.linger(came, pairs, cycles);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void pass_by(Mem& mem, Cell came) {
        mem.add(came, 1, Order::relaxed);
    }
};

// rank -> rank: a launch has SMs, so it no longer depends on its host or stream. Cell: RouteCell::launched in
// the peer's window. The flag orders no other memory.
struct Launched {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE void publish(Mem& mem, Cell cell, uint32_t epoch) {
        mem.store(cell, epoch, Order::relaxed, Scope::system);
    }
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool await(Mem& mem, Cell cell, uint32_t epoch, uint32_t patience_ns) {
        return mem.await_for(cell, epoch, patience_ns);
    }
};

// Decides which pairs of CTAs take part, next to other kernels such as NCCL's, here and on other ranks. A
// launch must not wait for SMs that they hold, nor hold SMs that they wait for. The first pair waits, for a
// bounded time each, for all peers' launches and then for the other pairs. Then it closes the door. Pairs
// that came before take part; later pairs leave at once. If a peer is missing, its host or stream may wait
// for a kernel that finds no SM here. Then at most half of the pairs take part, and those with higher numbers
// leave, too. `joined` counts pairs, and contains `closed` once; the last CTA out zeroes it. `members` has
// the epoch above the count.
struct Door {
    static constexpr uint32_t closed = 1 << 16;
    static constexpr int epoch_shift = 8;

    struct Place {
        int number, count;  // of the pair, of pairs that take part; -1, 0 for one that leaves
    };
    static MEGAMOE_PURE uint32_t without_peers(uint32_t num_pairs) { return (num_pairs + 1) / 2; }

    // Called by one thread of each pair. peers: how many ranks there are, `to(r)`, where rank r looks for
    // this one's launch, `from(r)`, where this one looks for rank r's, and patience_ns.
    template <class Mem, class Cell, class Peers>
    static MEGAMOE_DEVICE Place enter(Mem& mem, Cell joined, Cell members, uint32_t epoch, uint32_t num_pairs,
                                      uint32_t patience_ns, const Peers& peers) {
        uint32_t number = mem.fetch_add(joined, 1);
        if (number >= closed) return {-1, 0};
        if (number == 0) {
            bool all = true;
            MEGAMOE_UNROLL_BY(1)
            for (int r = 0; r < peers.count(); ++r) Launched::publish(mem, peers.to(r), epoch);
            MEGAMOE_UNROLL_BY(1)
            for (int r = 0; r < peers.count() && all; ++r)
                all = Launched::await(mem, peers.from(r), epoch, peers.patience_ns());
            if (all) mem.await_for(joined, num_pairs, patience_ns);
            uint32_t found = mem.fetch_add(joined, closed);
            if (!all && found > without_peers(num_pairs)) found = without_peers(num_pairs);
            mem.store(members, epoch << epoch_shift | found, Order::release, Scope::gpu);
            return {0, static_cast<int>(found)};
        }
        // Unlike other waits, this one continues in a poisoned launch, until the first pair's patience ends:
        // all pairs must know the same count.
        while (!mem.await(members, Until::at_least, epoch << epoch_shift, Scope::gpu,
                          Wait{Edge::grid_barrier, max_ranks, 0})) {
        }
        uint32_t found = mem.load(members, Order::relaxed, Scope::gpu) & ((1u << epoch_shift) - 1);
        if (number >= found) return {-1, 0};
        return {static_cast<int>(number), static_cast<int>(found)};
    }
};

// Finds the last CTA to arrive: all CTAs' earlier writes happen before what the last one does next.
struct LastArrival {
    template <class Mem, class Cell>
    static MEGAMOE_DEVICE bool arrive(Mem& mem, Cell ticket, uint32_t num_ctas) {
        bool last = mem.fetch_add(ticket, 1) == num_ctas - 1;
        if (last) mem.store(ticket, 0, Order::relaxed, Scope::gpu);  // the next launch starts at 0
        return last;
    }
};

}  // namespace megamoe
