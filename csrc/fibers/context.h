// The bottom of the fiber machine: switching stacks, and the stacks themselves.
//
// A switch saves what the calling convention forbids a callee to clobber: six registers and the stack pointer
// (about 5 ns; ucontext costs two system calls). Stacks are mapped once and kept between launches. They lie
// densely, because thousands of them need more pages than a TLB holds; and not at a power-of-two distance, at
// which their tops would share a handful of cache sets.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace fibers {

constexpr size_t stack_bytes = 16 * 1024 + 192;  // kernels use up to 5 KB

struct Context {
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t registers;
#endif
};

#if defined(__x86_64__)
__attribute__((naked, noinline, noipa)) inline void switch_stack(void** /*save*/, void* /*load*/) {
    asm("pushq %rbp\n\t"
        "pushq %rbx\n\t"
        "pushq %r12\n\t"
        "pushq %r13\n\t"
        "pushq %r14\n\t"
        "pushq %r15\n\t"
        "movq %rsp, (%rdi)\n\t"
        "movq %rsi, %rsp\n\t"
        "popq %r15\n\t"
        "popq %r14\n\t"
        "popq %r13\n\t"
        "popq %r12\n\t"
        "popq %rbx\n\t"
        "popq %rbp\n\t"
        "ret");
}
#endif

inline void switch_context(Context& from, Context& to) {
#if defined(__x86_64__)
    switch_stack(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.registers, &to.registers);
#endif
}

inline void make_context(Context& context, uint8_t* bottom, size_t bytes, void (*entry)()) {
#if defined(__x86_64__)
    // What switch_stack pops: six registers, the return address; then a null return address for unwinders.
    // After `ret` the stack pointer must be 8 modulo 16, as after a call.
    auto* top =
        reinterpret_cast<uint64_t*>((reinterpret_cast<uintptr_t>(bottom) + bytes) & ~uintptr_t(15)) - 8;
    for (int i = 0; i < 6; ++i) top[i] = 0;
    top[6] = reinterpret_cast<uint64_t>(entry);
    top[7] = 0;
    context.stack_pointer = top;
#else
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = bottom;
    context.registers.uc_stack.ss_size = bytes;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
#endif
}

// Stack i of the pool. Never unmapped: a process that emulates once will do so again. No guard pages, since a
// process may only have 64 K mappings; the machine compares the stack pointer with lowest() at every switch.
class StackPool {
  public:
    uint8_t* bottom(size_t index) const {
        return slabs_[index / slab_stacks] + (index % slab_stacks) * stack_bytes;
    }
    const uint8_t* lowest(size_t index) const { return bottom(index) + margin_bytes; }

    bool reserve(size_t count) {
        while (slabs_.size() * slab_stacks < count) {
            void* slab = mmap(nullptr, slab_stacks * stack_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (slab == MAP_FAILED) return false;
            slabs_.push_back(static_cast<uint8_t*>(slab));
        }
        return true;
    }

  private:
    static constexpr size_t slab_stacks = 512, margin_bytes = 8192;
    std::vector<uint8_t*> slabs_;
};

}  // namespace fibers
