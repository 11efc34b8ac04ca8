// What the emulated machine consists of: fibers, warps, warpgroups, CTAs, and the copies under way.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <string>
#include <vector>

#include "fibers/context.h"

namespace fibers {

constexpr int warp_size = 32;
constexpr int warpgroup_size = 128;
constexpr int num_named_barriers = 16;
constexpr int cluster_ctas = 2;
constexpr uint32_t no_peer = ~0u;  // of a flag wait: nobody in particular is waited for

enum class Waiting : uint8_t {
    nothing,
    mbarrier,
    named_barrier,
    cluster,
    warp,
    warpgroup,
    flag,
    time,
    exited
};
enum class WarpOperation : uint8_t {
    sync,
    shuffle,
    shuffle_xor,
    ballot,
    match,
    named_sync,
    cluster_sync,
    setmaxnreg
};
inline const char* name_of(WarpOperation operation) {
    static const char* const names[] = {"warp_sync", "shfl",       "shfl_xor",     "ballot",
                                        "match_any", "named_sync", "cluster_sync", "setmaxnreg"};
    return names[static_cast<int>(operation)];
}

enum Status : int { ok = 0, deadlock = 1, misuse = 2 };

struct Cta;

struct alignas(64) Fiber {  // what a switch reads lies in one line of the caches
    Context context;
    Cta* cta;
    Fiber* next;  // in the queue it is blocked in
    const uint8_t* lowest_stack;
    int thread;
    Waiting waiting;
    bool flag_reached;    // what a flag wait returns
    uint32_t value;       // mbarrier: parity; named barrier: id; flag: target
    const void* address;  // mbarrier or flag
    // a flag wait
    const uint32_t* abort;  // not 0: the wait is over
    uint64_t deadline;
    bool at_least;
    const char* what;     // for reports, with two numbers of the program's
    uint32_t numbers[2];  // an index, and a peer or no_peer
    // tensor-core instructions issued, and groups committed, since the launch began
    uint32_t wgmma_issued, wgmma_committed;

    int lane() const { return thread % warp_size; }
    int warp() const { return thread / warp_size; }
};

struct Queue {  // FIFO of blocked fibers
    Fiber* head = nullptr;
    Fiber* tail = nullptr;
    void push(Fiber* fiber) {
        fiber->next = nullptr;
        (head ? tail->next : head) = fiber;
        tail = fiber;
    }
};

struct Warp {
    uint32_t arrived = 0;  // lanes
    WarpOperation operation = WarpOperation::sync;
    uint32_t operand[warp_size];
    int parameter[warp_size];
    uint32_t result[warp_size];
};

// One wgmma of a warpgroup: issued by all 128 threads, executed when they wait for it.
struct Operand {
    const uint8_t* tile;  // first row of 128 bytes; null: in registers
    uint32_t byte;        // K-major: of each row
    uint32_t box_bytes;   // MN-major: between boxes of 64 columns; K-major: 0
    bool operator==(const Operand&) const = default;
};
struct Wgmma {
    Operand a, b;
    int n;
    bool is_e4m3, accumulate;
    uint32_t group;
    float* acc[warpgroup_size];
    const uint32_t* a_registers[warpgroup_size];
};

struct Warpgroup {
    int arrived = 0;  // at wgmma_wait, in which `pending` may stay in flight
    int pending = 0;
    int registers = 0;             // per thread
    int register_changes[4] = {};  // of each warp
    Queue blocked;
    uint32_t executed = 0, issued = 0;
    std::vector<Wgmma> in_flight;  // numbers [executed, issued)
};

struct NamedBarrier {
    int arrived = 0, expected = 0;
    Queue blocked;
};

struct MbarrierQueue {
    const void* barrier;
    Queue blocked;
};

// An asynchronous copy into shared memory. The source is read at issue or at landing, as the seed says: the
// program may rely on neither.
struct Load {
    Cta* cta;
    uint8_t* destination;
    uint64_t* barrier;
    const void* map;  // null: a plain copy from `source`
    const void* source;
    int coordinates[4];
    uint32_t bytes;
    uint64_t due;  // round
    std::vector<uint8_t> data;
};

// An asynchronous copy out of shared memory.
struct Store {
    Fiber* owner;
    const void* map;
    uint8_t* source;
    int coordinates[4];
    uint32_t bytes;
    bool committed, released, early_write;  // released: bulk_wait_read has returned
    bool adds;                              // to what is there, instead of writing over it
    std::vector<uint8_t> data;              // empty until the source was read
};

// An asynchronous copy of 16 bytes into shared memory by one thread, which lands when that waits.
struct Copy {
    Fiber* owner;
    uint8_t* destination;
    const void* source;  // null: zeros
};

struct Cta {
    const void* arguments = nullptr;  // of its rank, for the kernel
    int rank = 0, block = 0, num_ctas = 0, threads = 0;
    int live = 0;
    uint8_t* shared = nullptr;
    size_t shared_bytes = 0;
    Fiber* fibers = nullptr;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    NamedBarrier named[num_named_barriers];
    NamedBarrier cluster;                     // used in the cluster's first CTA
    std::vector<MbarrierQueue> mbarriers;     // those with waiters
    std::vector<const uint8_t*> initialised;  // mbarriers, until they are invalidated
    std::vector<Store> stores;
    std::vector<Copy> copies;
    int loads_in_flight = 0;

    // CTAs 2i and 2i + 1 of a rank are a cluster; all CTAs of a launch lie in one array.
    int member() const { return block % cluster_ctas; }
    Cta& in_cluster(int i) { return *(this + (i - member())); }
    bool has_cluster() const { return num_ctas % cluster_ctas == 0; }

    Warp& warp(const Fiber* fiber) { return warps[fiber->thread / warp_size]; }
    Warpgroup& warpgroup(const Fiber* fiber) { return warpgroups[fiber->thread / warpgroup_size]; }
};

// Compiled once and linked to each kernel (jit/host.py), as in the other headers.
#if defined(FIBERS_COMPILED)
std::string format_text(const char* format, va_list arguments) {
    char text[1024];
    vsnprintf(text, sizeof(text), format, arguments);
    return text;
}
__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string result = format_text(format, arguments);
    va_end(arguments);
    return result;
}
#endif

}  // namespace fibers
