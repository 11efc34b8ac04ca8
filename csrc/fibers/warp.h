// Identity of a thread, and what the 32 lanes of a warp do together: the last lane to arrive computes
// everybody's result.
#pragma once
#include "fibers/machine.h"

namespace fibers {

uint32_t warp_rendezvous(WarpOperation operation, uint32_t operand = 0, int parameter = 0);
void set_registers(int registers);

#if defined(FIBERS_COMPILED)
void finish_warp_operation(Warp& warp) {
    switch (warp.operation) {
        case WarpOperation::sync:
        case WarpOperation::named_sync:
        case WarpOperation::cluster_sync:
        case WarpOperation::setmaxnreg:
            break;
        case WarpOperation::shuffle:
            for (int i = 0; i < warp_size; ++i)
                warp.result[i] = warp.operand[warp.parameter[i] & (warp_size - 1)];
            break;
        case WarpOperation::shuffle_xor:
            for (int i = 0; i < warp_size; ++i)
                warp.result[i] = warp.operand[(i ^ warp.parameter[i]) & (warp_size - 1)];
            break;
        case WarpOperation::ballot: {
            uint32_t lanes = 0;
            for (int i = 0; i < warp_size; ++i) lanes |= (warp.operand[i] != 0 ? 1u : 0u) << i;
            for (int i = 0; i < warp_size; ++i) warp.result[i] = lanes;
            break;
        }
        case WarpOperation::match:
            for (int i = 0; i < warp_size; ++i) {
                uint32_t lanes = 0;
                for (int j = 0; j < warp_size; ++j)
                    lanes |= (warp.operand[i] == warp.operand[j] ? 1u : 0u) << j;
                warp.result[i] = lanes;
            }
            break;
    }
}

uint32_t warp_rendezvous(WarpOperation operation, uint32_t operand, int parameter) {
    Fiber* self = current;
    Warp& warp = self->cta->warp(self);
    int lane = self->lane();
    if (warp.arrived == 0) warp.operation = operation;
    if (warp.operation != operation)
        machine.fail("the lanes of a warp differ: %s here, %s in lanes %08x", name_of(operation),
                     name_of(warp.operation), warp.arrived);
    warp.operand[lane] = operand;
    warp.parameter[lane] = parameter;
    warp.arrived |= 1u << lane;
    if (warp.arrived != 0xffffffffu) {
        machine.block(Waiting::warp);
        return warp.result[lane];  // stays until all lanes have come to the next operation
    }
    warp.arrived = 0;
    ++machine.meetings;
    finish_warp_operation(warp);
    Fiber* first = self - lane;
    for (int i = 0; i < warp_size; ++i)
        if (i != lane) machine.wake(first + i);
    return warp.result[lane];
}

Warpgroup& whole_warpgroup(const char* operation) {
    Cta& cta = *current->cta;
    if (current->thread / warpgroup_size * warpgroup_size + warpgroup_size > cta.threads)
        machine.fail("%s: not in a whole warpgroup", operation);
    return cta.warpgroup(current);
}

// All 128 threads of a warpgroup meet; true for the last, which does the common work and then calls
// release_warpgroup().
bool meet_at_wgmma_wait(int pending) {
    Warpgroup& group = whole_warpgroup("wgmma_wait");
    if (group.arrived == 0) group.pending = pending;
    if (group.pending != pending)
        machine.fail("the threads of a warpgroup differ: wgmma_wait<%d> here, <%d> in %d others", pending,
                     group.pending, group.arrived);
    if (++group.arrived == warpgroup_size) return true;
    group.blocked.push(current);
    machine.block(Waiting::warpgroup);
    return false;
}
void release_warpgroup() {
    Warpgroup& group = current->cta->warpgroup(current);
    group.arrived = 0;
    machine.wake(group.blocked);
}

// Nothing to move; the sum is checked when the CTA ends (launch.h): 64 K registers an SM. PTX ISA,
// setmaxnreg: all warps of a warpgroup execute it, and have synchronised before the next one; it is no
// barrier itself.
void set_registers(int registers) {
    warp_rendezvous(WarpOperation::setmaxnreg);
    machine.preemption_point();
    if (current->lane() != 0) return;
    Warpgroup& group = whole_warpgroup("setmaxnreg");
    int change = ++group.register_changes[current->warp() % 4], warps = 0;  // that made it, with this one
    for (int changes : group.register_changes) {
        if (changes < change - 1)
            machine.fail("setmaxnreg, before all warps of the warpgroup made the last change");
        warps += changes >= change;
    }
    if (warps > 1 && group.registers != registers)
        machine.fail("the warps of a warpgroup differ: setmaxnreg %d here, %d before", registers,
                     group.registers);
    group.registers = registers;
}
#endif

}  // namespace fibers

namespace fibers::ops {

inline int thread_idx() { return current->thread; }
inline int lane_idx() { return current->lane(); }
inline int warp_idx() { return current->warp(); }
inline int block_idx() { return current->cta->block; }
inline int grid_dim() { return current->cta->num_ctas; }
inline uint8_t* dynamic_smem() { return current->cta->shared; }

inline void wait_for_previous_grid() {}

inline uint64_t globaltimer_ns() {
    machine.polled();
    return machine.clock_ns;
}
inline uint64_t clock_cycles() { return globaltimer_ns(); }
inline void sleep_ns(uint32_t) { machine.sleep(); }

inline void warp_sync() { warp_rendezvous(WarpOperation::sync); }
inline uint32_t shfl(uint32_t v, int lane) { return warp_rendezvous(WarpOperation::shuffle, v, lane); }
inline uint32_t shfl_xor(uint32_t v, int mask) {
    return warp_rendezvous(WarpOperation::shuffle_xor, v, mask);
}
inline uint64_t shfl(uint64_t v, int lane) {
    uint64_t high = shfl(static_cast<uint32_t>(v >> 32), lane);
    return high << 32 | shfl(static_cast<uint32_t>(v), lane);
}
inline int shfl(int v, int lane) { return static_cast<int>(shfl(static_cast<uint32_t>(v), lane)); }
inline int shfl_xor(int v, int mask) { return static_cast<int>(shfl_xor(static_cast<uint32_t>(v), mask)); }
inline float shfl(float v, int lane) {
    uint32_t bits = shfl(__builtin_bit_cast(uint32_t, v), lane);
    return __builtin_bit_cast(float, bits);
}
inline float shfl_xor(float v, int mask) {
    uint32_t bits = shfl_xor(__builtin_bit_cast(uint32_t, v), mask);
    return __builtin_bit_cast(float, bits);
}
inline uint32_t ballot(bool v) { return warp_rendezvous(WarpOperation::ballot, v ? 1u : 0u); }
inline uint32_t match_any(int v) { return warp_rendezvous(WarpOperation::match, static_cast<uint32_t>(v)); }
inline int popc(uint32_t v) { return __builtin_popcount(v); }
inline int ffs0(uint32_t v) { return __builtin_ctz(v); }
inline uint32_t lanes_below() { return (1u << lane_idx()) - 1u; }

template <int registers>
inline void registers_grow() {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0,
                  "setmaxnreg takes 24 ... 256 in steps of 8");
    set_registers(registers);
}
template <int registers>
inline void registers_shrink() {
    registers_grow<registers>();
}

}  // namespace fibers::ops
