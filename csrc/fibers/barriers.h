// mbarriers, named barriers.
//
// An mbarrier keeps its whole state in its own 8 bytes, as on the device: phase, arrivals still pending in
// this phase, bytes still to come. The phase completes when both are zero. Only the queue of blocked fibers
// lives in the CTA.
#pragma once
#include "fibers/machine.h"
#include "fibers/warp.h"

namespace fibers {

struct Mbarrier {
    static constexpr int32_t max_tx_bytes = (1 << 20) - 1;   // PTX ISA, "mbarrier object"
    static constexpr uint32_t max_arrivals = (1 << 15) - 1;  // the device has more, no CTA needs them
    // Shared memory starts as all ones, so an uninitialised barrier is noticed: its counts are beyond the
    // limit.
    int32_t tx_bytes;
    uint16_t expected, pending_and_phase;

    bool is_valid() const { return expected > 0 && expected <= max_arrivals && pending() <= expected; }
    uint32_t pending() const { return pending_and_phase >> 1; }
    uint32_t phase() const { return pending_and_phase & 1u; }
    void set(uint32_t pending, uint32_t phase) {
        pending_and_phase = static_cast<uint16_t>(pending << 1 | phase);
    }
};
static_assert(sizeof(Mbarrier) == 8);

Cta& member_cta(int member, const char* what);
Mbarrier* check_mbarrier(const Cta& cta, uint64_t* pointer, const char* what);
void arrive(Cta& cta, uint64_t* pointer, uint32_t tx_bytes, const char* what);

#if defined(FIBERS_COMPILED)
// A CTA of the calling thread's cluster, which must not have exited: its shared memory would be gone.
Cta& member_cta(int member, const char* what) {
    Cta& own = *current->cta;
    if (!own.has_cluster()) machine.fail("%s: %d CTAs do not make clusters of two", what, own.num_ctas);
    if (member < 0 || member >= cluster_ctas) machine.fail("%s: the cluster has no CTA %d", what, member);
    Cta& cta = own.in_cluster(member);
    if (cta.live == 0) machine.fail("%s: CTA %d of the cluster has exited", what, member);
    return cta;
}

std::string describe_mbarrier(const void* pointer) {
    const auto* barrier = static_cast<const Mbarrier*>(pointer);
    if (!barrier->is_valid()) return "not initialised";
    return text("phase %d, %d of %d arrivals and %d bytes missing", int(barrier->phase()),
                int(barrier->pending()), int(barrier->expected), barrier->tx_bytes);
}

Mbarrier* check_mbarrier(const Cta& cta, uint64_t* pointer, const char* what) {
    check_shared(cta, pointer, 8, 8, what);
    auto* barrier = reinterpret_cast<Mbarrier*>(pointer);
    if (!barrier->is_valid())
        machine.fail("%s: no mbarrier was initialised at shared %+td", what,
                     reinterpret_cast<uint8_t*>(pointer) - cta.shared);
    return barrier;
}

// Flips the phase if nothing is missing, and wakes who waited for it.
void complete_phase(Cta& cta, Mbarrier* barrier) {
    ++machine.progress;
    if (barrier->pending() != 0 || barrier->tx_bytes != 0) return;
    barrier->set(barrier->expected, barrier->phase() ^ 1u);
    for (size_t i = 0; i < cta.mbarriers.size(); ++i) {
        if (cta.mbarriers[i].barrier != barrier) continue;
        machine.wake(cta.mbarriers[i].blocked);
        cta.mbarriers[i] = cta.mbarriers.back();
        cta.mbarriers.pop_back();
        return;
    }
}

void arrive(Cta& cta, uint64_t* pointer, uint32_t tx_bytes, const char* what) {
    machine.preemption_point();
    Mbarrier* barrier = check_mbarrier(cta, pointer, what);
    if (barrier->pending() == 0)
        machine.fail("%s at shared +%td: more than %d arrivals in one phase", what,
                     reinterpret_cast<uint8_t*>(pointer) - cta.shared, int(barrier->expected));
    if (int64_t(barrier->tx_bytes) + tx_bytes > Mbarrier::max_tx_bytes)
        machine.fail("%s: tx-count overflow, %d + %u bytes", what, barrier->tx_bytes, tx_bytes);
    barrier->tx_bytes += static_cast<int32_t>(tx_bytes);
    barrier->set(barrier->pending() - 1, barrier->phase());
    complete_phase(cta, barrier);
}

// Bytes of an asynchronous copy have landed. May precede the expect_tx of the same phase.
void complete_tx(Cta& cta, uint64_t* pointer, uint32_t bytes) {
    auto* barrier = reinterpret_cast<Mbarrier*>(pointer);
    barrier->tx_bytes -= static_cast<int32_t>(bytes);
    complete_phase(cta, barrier);
}
#endif

}  // namespace fibers

namespace fibers::ops {

template <class V>
inline V* in_member(V* p, int member) {
    Cta& cta = member_cta(member, "in_member");
    size_t offset = check_shared(*current->cta, p, sizeof(V), alignof(V), "in_member");
    return reinterpret_cast<V*>(cta.shared + offset);
}

void mbar_init(uint64_t* bar, uint32_t arrivals);
void mbar_inval(uint64_t* bar);
Mbarrier* look_at(uint64_t* bar, uint32_t parity, const char* what);
void mbar_wait(uint64_t* bar, uint32_t parity);
void named_sync(int id, int num_threads);
void cluster_sync();
inline void mbar_fence_init() {}
inline void mbar_arrive(uint64_t* bar) { arrive(*current->cta, bar, 0, "mbar_arrive"); }
inline void mbar_arrive_at(uint64_t* bar, int member) {
    arrive(member_cta(member, "mbar_arrive_at"), in_member(bar, member), 0, "mbar_arrive_at");
}
inline void mbar_arrive_cluster(uint64_t* bar, int member) {
    arrive(member_cta(member, "mbar_arrive_cluster"), in_member(bar, member), 0, "mbar_arrive_cluster");
}
inline void mbar_arrive_at(uint64_t* bar, int member, uint32_t arrivals) {
    for (uint32_t i = 0; i < arrivals; ++i) mbar_arrive_at(bar, member);
}
inline void mbar_expect_tx(uint64_t* bar, uint32_t bytes) {
    machine.preemption_point();
    check_mbarrier(*current->cta, bar, "mbar_expect_tx")->tx_bytes += static_cast<int32_t>(bytes);
    ++machine.progress;
}
inline void mbar_arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
    arrive(*current->cta, bar, bytes, "mbar_arrive_expect_tx");
}
inline bool mbar_test(uint64_t* bar, uint32_t parity) {
    return look_at(bar, parity, "mbar_test")->phase() != parity;
}
inline void mbar_wait_cluster(uint64_t* bar, uint32_t parity) { mbar_wait(bar, parity); }

#if defined(FIBERS_COMPILED)
void mbar_init(uint64_t* bar, uint32_t arrivals) {
    check_shared(*current->cta, bar, 8, 8, "mbar_init");
    if (arrivals == 0 || arrivals > Mbarrier::max_arrivals) machine.fail("mbar_init: %u arrivals", arrivals);
    Mbarrier barrier{0, static_cast<uint16_t>(arrivals), 0};
    barrier.set(arrivals, 0);
    memcpy(bar, &barrier, 8);
    auto& all = current->cta->initialised;
    if (std::find(all.begin(), all.end(), reinterpret_cast<uint8_t*>(bar)) != all.end())
        machine.fail("mbar_init: the mbarrier was not invalidated");
    all.push_back(reinterpret_cast<uint8_t*>(bar));
}
void mbar_inval(uint64_t* bar) {
    check_mbarrier(*current->cta, bar, "mbar_inval");
    std::erase(current->cta->initialised, reinterpret_cast<uint8_t*>(bar));
    memset(bar, 0xff, 8);
}

Mbarrier* look_at(uint64_t* bar, uint32_t parity, const char* what) {
    machine.preemption_point();
    Mbarrier* barrier = check_mbarrier(*current->cta, bar, what);
    if (parity > 1) machine.fail("%s: parity %u", what, parity);
    return barrier;
}
void mbar_wait(uint64_t* bar, uint32_t parity) {
    Mbarrier* barrier = look_at(bar, parity, "mbar_wait");
    if (barrier->phase() != parity) return;
    Fiber* self = current;
    self->address = bar;
    self->value = parity;
    auto& queues = self->cta->mbarriers;
    size_t i = 0;
    while (i < queues.size() && queues[i].barrier != bar) ++i;
    if (i == queues.size()) queues.push_back({bar, {}});
    queues[i].blocked.push(self);
    machine.block(Waiting::mbarrier);
    // On the device a waiter that was overtaken by a whole phase would hang: it only sees the parity.
    if (barrier->phase() == parity)
        machine.fail(
            "mbar_wait at shared +%td: the next phase completed too before this thread saw the first",
            reinterpret_cast<uint8_t*>(bar) - self->cta->shared);
}

// Both barriers are .aligned on the machine: a lane that strays from its warp is an error.
void named_sync(int id, int num_threads) {
    warp_rendezvous(WarpOperation::named_sync);
    machine.preemption_point();
    Cta& cta = *current->cta;
    if (id < 0 || id >= num_named_barriers) machine.fail("named_sync: barrier %d", id);
    if (num_threads <= 0 || num_threads % warp_size || num_threads > cta.threads)
        machine.fail("named_sync(%d): %d threads", id, num_threads);
    NamedBarrier& barrier = cta.named[id];
    if (barrier.arrived == 0) barrier.expected = num_threads;
    if (barrier.expected != num_threads)
        machine.fail("named_sync(%d): %d threads here, %d threads for those who wait", id, num_threads,
                     barrier.expected);
    if (++barrier.arrived == num_threads) {
        barrier.arrived = 0;
        ++machine.meetings;
        machine.wake(barrier.blocked);
        return;
    }
    current->value = static_cast<uint32_t>(id);
    barrier.blocked.push(current);
    machine.block(Waiting::named_barrier);
}
void cluster_sync() {
    warp_rendezvous(WarpOperation::cluster_sync);
    machine.preemption_point();
    Cta& first = member_cta(0, "cluster_sync");
    if (++first.cluster.arrived == cluster_ctas * first.threads) {
        first.cluster.arrived = 0;
        ++machine.meetings;
        machine.wake(first.cluster.blocked);
        return;
    }
    first.cluster.blocked.push(current);
    machine.block(Waiting::cluster);
}
#endif

}  // namespace fibers::ops
