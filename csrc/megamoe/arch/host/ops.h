// The machine interface (arch/README.md) on a CPU: every GPU thread is a fiber. Everything here is plain C++;
// the machine itself is machine.h, and the pieces follow in the order of the interface.
#pragma once
#include "megamoe/arch/arch.h"  // the storage types
#include "megamoe/arch/host/barriers.h"
#include "megamoe/arch/host/machine.h"
#include "megamoe/arch/host/numeric.h"
#include "megamoe/arch/host/tma.h"
#include "megamoe/arch/host/warp.h"
#include "megamoe/arch/host/wgmma.h"

namespace megamoe::arch {

inline uint4_t load_streaming(const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16)
        host::machine.fail("load_streaming: %p is not a multiple of 16", pointer);
    host::machine.data_access();
    uint4_t v;
    memcpy(&v, pointer, 16);
    return v;
}
inline uint4_t load_streaming_below(const uint4_t* v, int i, int limit) {
    return i < limit ? load_streaming(v + i) : uint4_t{0, 0, 0, 0};
}
inline void store_vec(void* pointer, uint4_t v) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16)
        host::machine.fail("store_vec: %p is not a multiple of 16", pointer);
    host::machine.data_access();
    memcpy(pointer, &v, 16);
}
inline int take_ticket(int32_t* count) {
    host::machine.preemption_point();
    return (*count)++;
}
inline int look_at_count(const int32_t* count) {
    host::machine.preemption_point();
    return *count;
}
inline void count_shared(uint32_t* count, uint32_t by) { *count += by; }
inline void store_vec_below(uint4_t* v, int i, int limit, uint4_t value) {
    if (i < limit) store_vec(v + i, value);
}

}  // namespace megamoe::arch
