// Runs one kernel on all CTAs of all ranks: the emulation's cooperative launch.
#pragma once
#include <cstdlib>
#include <mutex>

#include "fibers/barriers.h"
#include "fibers/report.h"
#include "fibers/tma.h"
#include "fibers/warp.h"
#include "fibers/wgmma.h"

namespace fibers {

// What a launch needs to know; `arguments` has one address a rank, for kernel().
struct Launch {
    void (*kernel)(const void* arguments);
    std::vector<const void*> arguments;
    int num_ctas, threads;
    size_t smem_bytes;
    uint64_t seed;
    uint64_t timeout_ns;  // of the longest polling loop in the program
};
Status run(const Launch& launch, std::string* report);

#if defined(FIBERS_COMPILED)
constexpr size_t red_zone_bytes = 1024;  // behind each CTA's shared memory: a store there is noticed
// What each thread of a launch begins with. A warpgroup can have no more than what others have given back of
// these: of 384 threads 168 each, which is less than all 65536 of an SM.
int first_registers(int threads) { return std::min(255, 65536 / threads / 8 * 8); }

// What a thread must not leave behind.
void check_finished(Fiber* fiber) {
    Cta& cta = *fiber->cta;
    Warpgroup& group = cta.warpgroup(fiber);
    if (fiber->wgmma_issued != group.executed) machine.fail("the thread exits with wgmma in flight");
    for (const Store& store : cta.stores)
        if (store.owner == fiber && !store.released)
            machine.fail("the thread exits before its bulk stores have read shared memory");
    if (cta.live != 1) return;
    if (cta.loads_in_flight) machine.fail("the CTA exits with %d bulk loads in flight", cta.loads_in_flight);
    for (size_t i = 0; i < red_zone_bytes; ++i)
        if (cta.shared[cta.shared_bytes + i] != poison)
            machine.fail("byte %zu behind shared memory was overwritten", i);
    int registers = 0, scheduled = 0;
    for (const Warpgroup& g : cta.warpgroups) {
        registers += g.registers * warpgroup_size;
        scheduled += first_registers(cta.threads) * warpgroup_size;
        for (int changes : g.register_changes)
            if (changes != g.register_changes[0])
                machine.fail("setmaxnreg by some warps of a warpgroup only");
    }
    if (registers > scheduled)
        machine.fail("the warpgroups hold %d registers, the launch began with %d", registers, scheduled);
    // Writes of stores that nobody waited for still reach memory.
    for (const Store& store : cta.stores)
        if (!store.early_write) write_destination(store);
    cta.stores.clear();
}

// Shared memory of all CTAs, kept between launches.
class SharedPool {
  public:
    uint8_t* reserve(size_t bytes) {
        if (bytes > bytes_) {
            free(memory_);
            memory_ = static_cast<uint8_t*>(aligned_alloc(1024, bytes));
            bytes_ = memory_ ? bytes : 0;
        }
        if (memory_) memset(memory_, poison, bytes);
        return memory_;
    }

  private:
    uint8_t* memory_ = nullptr;
    size_t bytes_ = 0;
};
SharedPool shared_pool;
std::mutex launch_mutex;

Status run(const Launch& launch, std::string* report) {
    std::lock_guard<std::mutex> lock(launch_mutex);
    int num_ctas = launch.num_ctas, threads = launch.threads;
    size_t pitch = (launch.smem_bytes + red_zone_bytes + 1023) / 1024 * 1024;
    std::vector<Cta> ctas(launch.arguments.size() * static_cast<size_t>(num_ctas));
    uint8_t* shared = shared_pool.reserve(pitch * ctas.size());
    report->clear();
    if (ctas.empty() || threads < warp_size || threads > 1024 || threads % warp_size)
        *report = "a CTA has 32, 64, ... 1024 threads";
    if (launch.smem_bytes > 227 * 1024) *report = "more than 227 KB of shared memory";
    if (!shared) *report = "no memory for the CTAs' shared memory";
    if (!report->empty()) return Status::misuse;
    for (size_t i = 0; i < ctas.size(); ++i) {
        Cta& cta = ctas[i];
        cta.rank = static_cast<int>(i) / num_ctas;
        cta.block = static_cast<int>(i) % num_ctas;
        cta.num_ctas = num_ctas;
        cta.threads = threads;
        cta.arguments = launch.arguments[static_cast<size_t>(cta.rank)];
        cta.shared = shared + i * pitch;
        cta.shared_bytes = launch.smem_bytes;
        cta.warps.resize(static_cast<size_t>(threads / warp_size));
        cta.warpgroups.resize(static_cast<size_t>((threads + warpgroup_size - 1) / warpgroup_size));
        for (Warpgroup& group : cta.warpgroups) group.registers = first_registers(threads);
    }
    Status status = machine.run(launch.kernel, std::move(ctas), launch.seed, launch.timeout_ns);
    *report = machine.report();
    return status;
}
#endif

}  // namespace fibers
