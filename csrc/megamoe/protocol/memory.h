// The memory operations that cross CTAs or ranks. A `Memory` policy has:
//
//   using Cell = ...                                       a 32-bit flag or counter (device: uint32_t*)
//   uint32_t load(Cell, Order, Scope)                      relaxed or acquire
//   void store(Cell, uint32_t, Order, Scope)               relaxed or release
//   void add(Cell, uint32_t, Order)                        relaxed or release reduction
//   uint32_t fetch_add(Cell, uint32_t)                     acquire + release
//   bool await(Cell, Until, uint32_t target, Scope, Wait)  acquiring, bounded poll; false: poisoned launch
//   bool await_for(Cell, uint32_t target, uint32_t ns)     relaxed; false: the time was over first
//   bool linger(Cell, uint32_t target, uint32_t cycles)    the same, for at least the target, in SM cycles
//   uint64_t load_word(uint64_t*)                          relaxed, at system scope, in one piece
//   void store_word(uint64_t*, uint64_t)                   likewise
//   void fence_proxy_async()                               generic accesses before later async-proxy ones
//   void async_complete()                                  waits until this thread's bulk stores are written
//   bool aborted(); void fault(Wait, expected, seen); void raise_abort(int peer)
//   uint32_t coarse_time(), coarse_timeout()               in units of 2^20 ns
//
// Additions have gpu scope only: no counter crosses ranks, because a peer stores its epoch. So an addition at
// system scope does not compile. A relaxed load or store has system scope on the device, whatever is
// requested.
//
// Implementations: protocol/ptx_memory.cuh (Hopper), protocol/host_memory.h (fibers), tests/model/model.h
// (model checker). protocol/edges.h uses only this, so the checker runs the kernel's own code.
#pragma once
#include "megamoe/layout/args.h"

namespace megamoe {

enum class Order { relaxed, acquire, release };
enum class Scope { gpu, system };
enum class Until { at_least, equal };  // at_least compares as a wrap-safe signed difference

struct Wait {  // what a fault record would say of this wait
    Edge edge;
    uint32_t peer;   // rank waited for, or max_ranks
    uint32_t index;  // block, token, ...
};

}  // namespace megamoe
