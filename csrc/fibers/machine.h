// The emulated machine: one fiber per GPU thread, every CTA of every rank co-resident, one OS thread.
//
// Time passes in rounds. A round resumes each fiber that was ready when it began; then copies land, flag
// waits are tested and sleepers wake. A blocked fiber is resumed only when somebody wakes it, so the cost
// follows the events. The clock is virtual: it creeps while something changes and runs towards the next
// deadline when nothing does, so a timeout costs no real time. `progress` counts changes that another thread
// could see. No progress and no deadline left: a deadlock, reported with who waits for what.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fibers/state.h"

namespace fibers {

// Ready fibers, oldest first; a shuffled machine takes them from a random place.
class ReadyQueue {
  public:
    void reserve(size_t count) {
        size_t capacity = 16;
        while (capacity < count) capacity *= 2;
        slots_.assign(capacity, nullptr);
        mask_ = capacity - 1;
        head_ = tail_ = 0;
    }
    size_t size() const { return tail_ - head_; }
    void push(Fiber* fiber) { slots_[tail_++ & mask_] = fiber; }
    // Thousands of stacks do not fit into the caches: fetch those of the next fibers meanwhile (20 ns a
    // switch instead of 60).
    Fiber* pop() {
        if (const Fiber* soon = slots_[(head_ + lookahead) & mask_]) __builtin_prefetch(soon);
#if defined(__x86_64__)
        if (const Fiber* next = slots_[(head_ + lookahead / 2) & mask_])
            for (int line = 0; line < 4; ++line)  // a switch and the functions that it returns to
                __builtin_prefetch(static_cast<const uint8_t*>(next->context.stack_pointer) + 64 * line);
#endif
        return slots_[head_++ & mask_];
    }
    // In random order, chosen ahead so that fetching ahead still works; `random` is 32 bits.
    Fiber* pop_random(uint64_t random) {
        if (size() > lookahead) swap(lookahead, lookahead + ((random * (size() - lookahead)) >> 32));
        swap(0, (random % 65536 * std::min<size_t>(size(), lookahead)) >> 16);
        return pop();
    }

  private:
    static constexpr size_t lookahead = 8;
    void swap(size_t i, size_t j) { std::swap(slots_[(head_ + i) & mask_], slots_[(head_ + j) & mask_]); }

    std::vector<Fiber*> slots_;
    size_t mask_ = 0, head_ = 0, tail_ = 0;
};

// Hidden: each emulated kernel that a process has loaded has its own.
extern __attribute__((visibility("hidden"))) Fiber* current;

class Machine {
  public:
    static constexpr uint64_t round_ns = 50;
    // Rounds without progress before the clock runs: while some threads only poll, and while some still meet
    // (which may be polling by whole warps, or a computation: the longest of any test took 3,900 rounds,
    // 2026-11-29).
    static constexpr uint64_t patience = 1024, patience_with_meetings = 8000;

    std::vector<Cta> ctas;
    std::vector<Load> loads;
    uint64_t round = 0, clock_ns = 0, progress = 0;
    uint64_t meetings = 0;  // completed warp operations and barriers
    uint64_t switches = 0;  // statistics
    uint32_t polls = 0;     // loads since the last switch
    bool shuffled = false;

    Status run(void (*kernel)(const void*), std::vector<Cta>&& ctas_of_all_ranks, uint64_t seed,
               uint64_t timeout_ns);
    const std::string& report() const { return report_; }

    // Blocks the calling fiber; whoever ends the wait calls wake(). Returns then.
    void block(Waiting waiting) {
        current->waiting = waiting;
        leave();
    }
    void wake(Fiber* fiber) {
        fiber->waiting = Waiting::nothing;
        ready_.push(fiber);
    }
    void wake(Queue& queue) {
        for (Fiber* fiber = queue.head; fiber;) {
            Fiber* next = fiber->next;
            wake(fiber);
            fiber = next;
        }
        queue = Queue();
    }
    void yield() {
        ready_.push(current);
        leave();
    }
    void sleep() {  // until the next round
        sleepers_.push_back(current);
        block(Waiting::time);
    }
    // A place where a GPU thread could be overtaken, by one step or, seldom, by hundreds: the seed decides.
    void preemption_point() {
        if (!shuffled) return;
        uint32_t dice = random();
        if (dice % 8 == 0) yield();
        if (dice % 512 == 1) stall();
    }
    void data_access() {  // the same for ordinary accesses, which are many
        if (shuffled && random() % 4096 == 0) stall();
    }
    // A load in a program's own polling loop: the loop must not keep the others from running.
    void polled() {
        if (++polls >= 64) yield();
    }
    // Blocks until the flag reaches the target (true), or somebody aborts or the deadline passes (false).
    bool wait_for_flag(Fiber* fiber) {
        flag_waits_.push_back(fiber);
        block(Waiting::flag);
        return fiber->flag_reached;
    }
    static bool flag_satisfied(const Fiber* fiber) {
        uint32_t seen = *static_cast<const volatile uint32_t*>(fiber->address);
        return fiber->at_least ? static_cast<int32_t>(seen - fiber->value) >= 0 : seen == fiber->value;
    }

    void stall() {
        for (uint32_t rounds = random() % 256; rounds > 0; --rounds) {
            held_back_ = true;
            sleep();
        }
    }
    // Rounds that an asynchronous operation takes: few, now and then many.
    uint32_t delay() {
        if (!shuffled) return 0;
        return random() % 8 ? random() % 4 : random() % 128;
    }
    uint32_t random() {  // xorshift64*
        random_ ^= random_ >> 12;
        random_ ^= random_ << 25;
        random_ ^= random_ >> 27;
        return static_cast<uint32_t>((random_ * 0x2545F4914F6CDD1Dull) >> 32);
    }

    [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    // Keeps the program's own message, and who waits for what, the first time; the launch goes on.
    void note(const char* format, ...) __attribute__((format(printf, 2, 3)));

  private:
    void leave();
    // The fiber to run next; null: the round is over.
    Fiber* pick() {
        ++switches;
        polls = 0;
        while (budget_ > 0) {
            --budget_;
            if (!shuffled) return ready_.pop();
            Fiber* fiber = ready_.pop_random(random());
            if (!is_slow(fiber)) return fiber;
            held_back_ = true;
            ready_.push(fiber);
        }
        return nullptr;
    }
    // For a while one warp, CTA or rank lags far behind, so that others overtake it by more than a step.
    enum class Slow { nobody, warp, cta, rank };
    void choose_slow() {
        slow_ = static_cast<Slow>(random() % 4);
        slow_cta_ = &ctas[random() % ctas.size()];
        slow_warp_ = static_cast<int>(random() % slow_cta_->warps.size());
        slow_until_ = round + (uint64_t(16) << random() % 7);
    }
    bool is_slow(const Fiber* fiber) {
        bool slow = (slow_ == Slow::warp && fiber->cta == slow_cta_ && fiber->warp() == slow_warp_) ||
                    (slow_ == Slow::cta && fiber->cta == slow_cta_) ||
                    (slow_ == Slow::rank && fiber->cta->rank == slow_cta_->rank);
        return slow && random() % 64 != 0;
    }
    static void entry();
    void land_loads();
    void test_flags();
    Status watch();
    std::string describe(const Fiber* fiber) const;
    std::string describe_waits() const;

    StackPool stacks_;
    std::vector<Fiber> fibers_;
    ReadyQueue ready_;
    std::vector<Fiber*> sleepers_, flag_waits_;
    Context scheduler_;
    void (*kernel_)(const void*) = nullptr;
    uint64_t timeout_ns_ = 0;  // of the program's own polling loops, the longest
    size_t live_ = 0, budget_ = 0;
    uint64_t random_ = 1;
    uint64_t progress_seen_ = 0, meetings_seen_ = 0, quiet_rounds_ = 0, quiet_since_ns_ = 0, stride_ns_ = 0;
    Slow slow_ = Slow::nobody;
    uint64_t slow_until_ = 0;
    bool held_back_ = false;  // in this round a fiber did not run though it could
    int slow_warp_ = 0;
    const Cta* slow_cta_ = nullptr;
    Status status_ = Status::ok;
    std::string report_;
};

extern __attribute__((visibility("hidden"))) Machine machine;

void land(Load& load);                       // tma.h
std::string describe_mbarrier(const void*);  // barriers.h
void check_finished(Fiber* fiber);           // launch.h

#if defined(FIBERS_COMPILED)
Fiber* current = nullptr;
Machine machine;

void Machine::leave() {
    Fiber* self = current;
    if (static_cast<uint8_t*>(__builtin_frame_address(0)) < self->lowest_stack && status_ == Status::ok)
        fail("the fiber's stack of %zu bytes overflows", stack_bytes);
    Fiber* next = pick();
    if (next == self) return;
    current = next;
    switch_context(self->context, next ? next->context : scheduler_);
}

void Machine::note(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (report_.empty()) report_ = format_text(format, arguments) + "\n" + describe_waits();
    va_end(arguments);
}

// Ends the launch. The fibers are abandoned where they are: kernel code owns nothing that needs a destructor.
void Machine::fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string what = format_text(format, arguments);
    va_end(arguments);
    report_ = text("rank %d cta %d warp %d lane %d: ", current->cta->rank, current->cta->block,
                   current->warp(), current->lane()) +
              what + "\n" + describe_waits();
    status_ = Status::misuse;
    Fiber* self = current;
    current = nullptr;
    switch_context(self->context, scheduler_);
    abort();  // unreachable
}

void Machine::entry() {
    machine.kernel_(current->cta->arguments);
    check_finished(current);
    ++machine.progress;
    --machine.live_;
    --current->cta->live;
    machine.block(Waiting::exited);
    abort();  // unreachable
}

void Machine::land_loads() {
    for (size_t i = 0; i < loads.size();) {
        if (loads[i].due > round) {
            ++i;
            continue;
        }
        Load load = std::move(loads[i]);
        if (i + 1 < loads.size()) loads[i] = std::move(loads.back());
        loads.pop_back();
        land(load);
        ++progress;
    }
}

void Machine::test_flags() {
    Fiber* late = nullptr;  // only the first past its deadline fails now: it raises the others' abort flag
    size_t kept = 0;
    for (Fiber* fiber : flag_waits_) {
        bool reached = flag_satisfied(fiber);
        if (reached || *static_cast<const volatile uint32_t*>(fiber->abort) != 0) {
            fiber->flag_reached = reached;
            wake(fiber);
            continue;
        }
        if (fiber->deadline <= clock_ns && (!late || fiber->deadline < late->deadline)) late = fiber;
        flag_waits_[kept++] = fiber;
    }
    flag_waits_.resize(kept);
    if (late) {
        late->flag_reached = false;
        flag_waits_.erase(std::find(flag_waits_.begin(), flag_waits_.end(), late));
        wake(late);
    }
}

// After each round: moves the clock, finds deadlocks.
Status Machine::watch() {
    if (progress != progress_seen_) {
        progress_seen_ = progress;
        meetings_seen_ = meetings;
        quiet_rounds_ = stride_ns_ = 0;
        quiet_since_ns_ = clock_ns;
        return Status::ok;
    }
    if (held_back_) return Status::ok;  // quiet because we made it so
    ++quiet_rounds_;
    bool nobody_polls = ready_.size() == 0 && loads.empty();
    if (!nobody_polls && quiet_rounds_ < (meetings == meetings_seen_ ? patience : patience_with_meetings))
        return Status::ok;
    uint64_t deadline = UINT64_MAX;
    for (const Fiber* fiber : flag_waits_) deadline = std::min(deadline, fiber->deadline);
    bool hopeless =
        nobody_polls ? deadline == UINT64_MAX : clock_ns - quiet_since_ns_ > 4 * timeout_ns_ + 1'000'000'000;
    if (hopeless) {
        report_ += text("deadlock: nothing changed for %llu rounds\n",
                        static_cast<unsigned long long>(quiet_rounds_));
        report_ += describe_waits();
        return Status::deadlock;
    }
    if (nobody_polls) {
        clock_ns = std::max(clock_ns, deadline);
    } else {  // pollers may have deadlines of their own, so approach by doubling strides
        if (quiet_rounds_ % 16 == 0) stride_ns_ = std::max<uint64_t>(1000, stride_ns_ * 2);
        clock_ns = std::min(clock_ns + stride_ns_, std::max(deadline, clock_ns));
    }
    return Status::ok;
}

Status Machine::run(void (*kernel)(const void*), std::vector<Cta>&& ctas_of_all_ranks, uint64_t seed,
                    uint64_t timeout_ns) {
    timeout_ns_ = timeout_ns;
    ctas = std::move(ctas_of_all_ranks);
    loads.clear();
    sleepers_.clear();
    flag_waits_.clear();
    report_.clear();
    kernel_ = kernel;
    status_ = Status::ok;
    round = clock_ns = progress = meetings = switches = 0;
    progress_seen_ = meetings_seen_ = quiet_rounds_ = quiet_since_ns_ = stride_ns_ = 0;
    shuffled = seed != 0;
    random_ = (seed + 1) * 0x9E3779B97F4A7C15ull | 1;
    slow_ = Slow::nobody;
    slow_until_ = 0;
    live_ = 0;
    for (const Cta& cta : ctas) live_ += static_cast<size_t>(cta.threads);
    if (!stacks_.reserve(live_)) {
        report_ = "no memory for the stacks of the fibers";
        return Status::misuse;
    }
    fibers_.assign(live_, Fiber());
    ready_.reserve(live_ + 1);
    size_t index = 0;
    for (Cta& cta : ctas) {
        cta.fibers = &fibers_[index];
        cta.live = cta.threads;
        for (int thread = 0; thread < cta.threads; ++thread, ++index) {
            Fiber& fiber = fibers_[index];
            fiber.cta = &cta;
            fiber.thread = thread;
            fiber.lowest_stack = stacks_.lowest(index);
            make_context(fiber.context, stacks_.bottom(index), stack_bytes, &Machine::entry);
            ready_.push(&fiber);
        }
    }
    while (live_ > 0) {
        if (shuffled && round >= slow_until_) choose_slow();
        held_back_ = false;
        budget_ = ready_.size();
        if (Fiber* first = budget_ ? pick() : nullptr) {
            current = first;
            switch_context(scheduler_, first->context);
        }
        if (status_ != Status::ok) return status_;
        ++round;
        clock_ns += round_ns;
        land_loads();
        test_flags();
        for (Fiber* fiber : sleepers_) wake(fiber);
        sleepers_.clear();
        if (live_ > 0)
            if (Status status = watch(); status != Status::ok) return status;
    }
    return Status::ok;
}

size_t check_shared(const Cta& cta, const void* pointer, size_t bytes, size_t alignment, const char* what) {
    ptrdiff_t offset = static_cast<const uint8_t*>(pointer) - cta.shared;
    if (offset < 0 || static_cast<size_t>(offset) + bytes > cta.shared_bytes)
        machine.fail("%s: %zu bytes at shared %+td are outside the CTA's %zu bytes", what, bytes, offset,
                     cta.shared_bytes);
    if (static_cast<size_t>(offset) % alignment)
        machine.fail("%s: shared +%td is not a multiple of %zu", what, offset, alignment);
    // PTX ISA, mbarrier.inval: memory of an mbarrier must not be used otherwise before. 8 bytes: the barrier.
    const uint8_t* begin = cta.shared + offset;
    for (const uint8_t* barrier : cta.initialised)
        if (bytes > 8 && barrier + 8 > begin && barrier < begin + bytes)
            machine.fail("%s: an mbarrier at shared %+td was not invalidated", what, barrier - cta.shared);
    return static_cast<size_t>(offset);
}
#endif

// ---- what the operations ask of shared memory

// Checks that [pointer, +bytes) is inside a CTA's shared memory and aligned; the offset.
size_t check_shared(const Cta& cta, const void* pointer, size_t bytes, size_t alignment, const char* what);

// The swizzle of rows of 128, 64 or 32 bytes: in each 1024, 512 or 256 bytes, the number of a 16-byte chunk
// in its row is XORed with that of the 128 bytes that it lies in.
constexpr size_t swizzle(size_t offset, size_t row_bytes) {
    return offset ^ ((offset >> 3) & (row_bytes - 16));
}
constexpr size_t swizzle_128b(size_t offset) { return swizzle(offset, 128); }

}  // namespace fibers
