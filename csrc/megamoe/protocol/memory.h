// The vocabulary of memory operations that cross CTAs or ranks. A `Memory` policy offers:
//
//   using Cell = ...                                     a 32-bit flag or counter (device: uint32_t*)
//   uint32_t load(Cell, Order, Scope)                    relaxed or acquire
//   void store(Cell, uint32_t, Order, Scope)             relaxed or release
//   void add(Cell, uint32_t, Order)                      relaxed or release reduction
//   uint32_t fetch_add(Cell, uint32_t)                   acquire + release
//   bool await(Cell, Until, uint32_t target, Scope, Wait)  acquiring, bounded poll; false = poisoned launch
//   bool await_for(Cell, uint32_t target, uint32_t ns)     relaxed; false = that time was over first
//   bool linger(Cell, uint32_t target, uint32_t cycles)    the same, at least the target, in cycles of the SM
//   uint64_t load_word(uint64_t*), void store_word(uint64_t*, uint64_t)    relaxed, at system scope, in one
//   piece void fence_proxy_async()                             orders generic accesses with later async-proxy
//   ones void async_complete()                                waits until this thread's bulk stores are
//   written
//
// Additions are at gpu scope, and take no other: nothing counts across ranks (a peer stores its epoch), and
// an addition at system scope that is not implemented must not compile, rather than pass the checker and be
// .gpu. A relaxed load or store is at system scope on the device, whichever is asked for.
//
//   bool aborted(); void fault(Wait, expected, seen); void raise_abort(int peer)
//   uint32_t coarse_time(), coarse_timeout()             units of 2^20 ns
//
// Implementations: protocol/ptx_memory.cuh (Hopper), protocol/host_memory.h (fibers), tests/model/model.h
// (model checker). protocol/edges.h is written on this and nothing else, so the checker runs the very code
// that the kernel runs.
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
