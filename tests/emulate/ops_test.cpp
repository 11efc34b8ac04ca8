// Small kernels that exercise one operation of the emulated machine each; tests/emulate/test_ops.py fills
// Args and checks. Numbers travel in args.topk_ids (int32), data in args.rows_in, args.rows_out and the
// tensor maps.
#include "megamoe/arch/host/entry.h"
#include "megamoe/protocol/host_memory.h"

using namespace megamoe;

namespace {

void all_threads_meet() { arch::named_sync(0, fibers::current->cta->threads); }

constexpr int smem_bytes = 64 * 1024;
constexpr size_t tail = 60 * 1024;  // barriers lie here

const Gemm<1>* table(const Args& args) { return reinterpret_cast<const ForwardArgs&>(args).gemm; }
const int32_t* numbers(const Args& args) { return static_cast<const int32_t*>(args.topk_ids); }
template <class V>
V* output(const Args& args) {
    return static_cast<V*>(args.rows_out);
}
uint64_t* barriers() { return reinterpret_cast<uint64_t*>(arch::dynamic_smem() + tail); }

void init_barriers(int count, uint32_t arrivals) {
    if (arch::thread_idx() == 0) {
        for (int i = 0; i < count; ++i) arch::mbar_init(barriers() + i, arrivals);
        arch::mbar_fence_init();
    }
    all_threads_meet();
}

// One producer, three consuming warps, a ring of two slots: y[lap, thread] is what each consumer saw. The
// second waits only where a look says that it has to.
void ring(const Args& args) {
    uint64_t *full = barriers(), *empty = barriers() + 2;
    auto* slots = reinterpret_cast<int*>(arch::dynamic_smem());
    if (arch::thread_idx() == 0) {
        for (int s = 0; s < 2; ++s) {
            arch::mbar_init(full + s, 1);
            arch::mbar_init(empty + s, 96);
        }
    }
    all_threads_meet();
    int laps = numbers(args)[0];
    for (int lap = 0; lap < laps; ++lap) {
        int slot = lap % 2;
        uint32_t parity = lap / 2 % 2;
        if (arch::thread_idx() == 0) {
            arch::mbar_wait(empty + slot, parity ^ 1);
            slots[slot] = lap;
            arch::mbar_arrive(full + slot);
        } else if (arch::warp_idx() > 0) {
            bool has_arrived = arch::warp_idx() == 2 && arch::mbar_test(full + slot, parity);
            if (!has_arrived) arch::mbar_wait(full + slot, parity);
            output<int>(args)[lap * 96 + arch::thread_idx() - 32] = slots[slot];
            arch::mbar_arrive(empty + slot);
        }
    }
}

// numbers: coordinates. Shared memory as it looks afterwards -> y.
void load(const Args& args) {
    const int32_t* at = numbers(args);
    init_barriers(1, 1);
    auto bytes = static_cast<uint32_t>(at[4]);
    if (arch::thread_idx() == 0) {
        arch::mbar_arrive_expect_tx(barriers(), bytes);
        if (at[5] == 2) {
            arch::tma_load_2d(arch::dynamic_smem(), table(args)[0].a, barriers(), at[0], at[1]);
        } else if (at[5] == 4) {
            arch::tma_load_4d(arch::dynamic_smem(), table(args)[0].a, barriers(), at[0], at[1], at[2], at[3]);
        } else {
            arch::bulk_load(arch::dynamic_smem(), args.rows_in, bytes, barriers());
        }
    }
    if (at[6] == 0) arch::mbar_wait(barriers(), 0);  // else: read too early
    for (uint32_t i = uint32_t(arch::thread_idx()); i < bytes; i += 128)
        output<uint8_t>(args)[i] = arch::dynamic_smem()[i];
    all_threads_meet();
    arch::mbar_wait(barriers(), 0);
}

// x: an image of shared memory, stored to gemm[1].out at numbers 0 ... 3. numbers[4]: 1 overwrites the source
// before bulk_wait_read. numbers[5]: 1 publishes (copies the tensor to `x_pool`) before bulk_wait.
// numbers[8]: 2 and 4 store so many dimensions, 5 adds in four.
void store(const Args& args) {
    const int32_t* at = numbers(args);
    const TensorMap* map = table(args)[1].out;
    uint8_t* source = arch::dynamic_smem();
    for (int i = arch::thread_idx(); i < at[6]; i += 128)
        source[i] = static_cast<const uint8_t*>(args.rows_in)[i];
    arch::fence_proxy_async_shared();
    all_threads_meet();
    if (arch::thread_idx() == 0) {
        if (at[8] == 2) arch::tma_store_2d(map, source, at[0], at[1]);
        if (at[8] == 4) arch::tma_store_4d(map, source, at[0], at[1], at[2], at[3]);
        if (at[8] == 5) arch::tma_reduce_add_4d(map, source, at[0], at[1], at[2], at[3]);
        arch::bulk_commit();
        if (at[4]) memset(source, 0x11, static_cast<size_t>(at[6]));
        arch::bulk_wait_read();
        if (!at[5]) arch::bulk_wait();
        memcpy(args.x_pool, args.y_rows, static_cast<size_t>(at[7]));
        arch::bulk_wait();
    }
}

// x: floats. y[2, count]: ex2 and rcp of them.
void elementary(const Args& args) {
    const auto* in = static_cast<const float*>(args.rows_in);
    int count = numbers(args)[0];
    for (int i = arch::thread_idx(); i < count; i += 32) {
        output<float>(args)[i] = arch::ex2(in[i]);
        output<float>(args)[count + i] = arch::rcp(in[i]);
    }
}

// C[M, N] = A[M, K] B[N, K]^T in fp32: a producer warp, two math warpgroups, three pipeline stages of 128
// bytes. Compares with nothing; C is stored by its fragments. With numbers[3] the pipeline's release is
// forgotten in the last lap.
template <class Element>
void gemm(const Args& args) {
    constexpr int stages = 3, columns_a_stage = 128 / sizeof(Element);
    struct GemmId {
        uint8_t a[128 * 128], b[128 * 128];
    };
    auto* ring_of = reinterpret_cast<GemmId*>(arch::dynamic_smem());
    auto* bars = reinterpret_cast<uint64_t*>(arch::dynamic_smem() + sizeof(GemmId) * stages);
    uint64_t *full = bars, *empty = bars + stages;
    if (arch::thread_idx() == 0) {
        for (int s = 0; s < stages; ++s) {
            arch::mbar_init(full + s, 1);
            arch::mbar_init(empty + s, 2);
        }
        arch::mbar_fence_init();
    }
    all_threads_meet();
    int m = numbers(args)[0], n = numbers(args)[1], k = numbers(args)[2];
    int tiles_m = ceil_div(m, 128), tiles_n = ceil_div(n, 128), steps = ceil_div(k, columns_a_stage), lap = 0;
    int group = arch::warp_idx() / 4 - 1;
    if (group < 0)
        arch::registers_shrink<40>();
    else
        arch::registers_grow<216>();
    for (int tile = arch::block_idx(); tile < tiles_m * tiles_n; tile += arch::grid_dim()) {
        int row0 = tile / tiles_n * 128, column0 = tile % tiles_n * 128;
        float acc[64];
        for (int step = 0; step < steps; ++step, ++lap) {
            int slot = lap % stages;
            uint32_t parity = lap / stages % 2;
            GemmId& stage = ring_of[slot];
            if (arch::thread_idx() == 0) {
                arch::mbar_wait(empty + slot, parity ^ 1);
                arch::mbar_arrive_expect_tx(full + slot, sizeof(GemmId));
                for (int half = 0; half < 2; ++half)
                    arch::tma_load_2d(stage.a + half * 8192, table(args)[0].a, full + slot,
                                      step * columns_a_stage, row0 + 64 * half);
                arch::tma_load_4d(stage.b, &table(args)[0].b, full + slot, step * columns_a_stage, column0, 0,
                                  0);
            } else if (group >= 0) {
                arch::mbar_wait(full + slot, parity);
                arch::Desc a = arch::make_desc(stage.a + group * 8192), b = arch::make_desc(stage.b);
                arch::fence_accumulator(acc);
                arch::wgmma_fence();
                for (int byte = 0; byte < 128; byte += 32)
                    arch::wgmma<Element>(acc, arch::desc_advance(a, byte), arch::desc_advance(b, byte),
                                         step + byte != 0);
                arch::wgmma_commit();
                arch::wgmma_wait<0>();
                bool forget = numbers(args)[3] && step == steps - 1;
                if (arch::thread_idx() % 128 == 0 && !forget) arch::mbar_arrive(empty + slot);
            }
        }
        if (group < 0) continue;
        for (int i = 0; i < 64; ++i) {
            int row =
                row0 + 64 * group + 16 * (arch::warp_idx() % 4) + 8 * (i / 2 % 2) + arch::lane_idx() / 4;
            int column = column0 + 8 * (i / 4) + 2 * (arch::lane_idx() % 4) + i % 2;
            if (row < m && column < n) output<float>(args)[row * n + column] = acc[i];
        }
    }
}

// Two warps meet at barrier 1 and two others at barrier 2, in different rhythms; then all. y: what each
// thread saw others write.
void named(const Args& args) {
    auto* cells = reinterpret_cast<volatile int*>(arch::dynamic_smem());
    int team = arch::thread_idx() / 64, laps = team == 0 ? 5 : 9, errors = 0;
    cells[arch::thread_idx()] = 0;
    all_threads_meet();
    for (int lap = 1; lap <= laps; ++lap) {
        cells[arch::thread_idx()] = lap;
        arch::named_sync(1 + team, 64);
        for (int i = 0; i < 64; ++i) errors += cells[team * 64 + i] != lap;
        arch::named_sync(1 + team, 64);
    }
    all_threads_meet();
    for (int i = 0; i < 128; ++i) errors += cells[i] != (i < 64 ? 5 : 9);
    output<int>(args)[arch::thread_idx()] = errors;
}

// y[lane, 8]
void warp(const Args& args) {
    int lane = arch::lane_idx(), v = static_cast<const int32_t*>(args.rows_in)[lane];
    auto* out = output<uint32_t>(args) + 8 * lane;
    out[0] = static_cast<uint32_t>(arch::shfl(v, (lane + 5) % 32));
    out[1] = static_cast<uint32_t>(arch::shfl_xor(v, 9));
    out[2] = arch::ballot(v % 2 != 0);
    out[3] = arch::match_any(v);
    out[4] = static_cast<uint32_t>(arch::shfl(static_cast<float>(v) * 0.5f, 3) * 2.0f);
    out[5] = static_cast<uint32_t>(arch::popc(out[3]));
    out[6] = static_cast<uint32_t>(arch::ffs0(out[3]));
    out[7] = arch::lanes_below();
    arch::warp_sync();
}

// x: floats in pairs. y: 3 words a pair: bf16x2, e4m3x2, and the bits of bf16_lo of the first.
void convert(const Args& args) {
    const auto* in = static_cast<const float*>(args.rows_in);
    for (int i = arch::thread_idx(); i < numbers(args)[0]; i += 32) {
        uint32_t* out = output<uint32_t>(args) + 3 * i;
        out[0] = arch::pack_bf16x2(in[2 * i], in[2 * i + 1]);
        out[1] = arch::pack_e4m3x2(in[2 * i], in[2 * i + 1]);
        out[2] = __builtin_bit_cast(uint32_t, arch::bf16_lo(out[0]));
    }
}

// Rank 0 publishes after a while; the others wait. numbers[0]: 1 forgets to publish. y[rank]: 1 reached, 2
// gave up. The last thread of each rank polls by itself, as transport does.
void await(const Args& args) {
    Memory mem{args};
    auto* cell = reinterpret_cast<uint32_t*>(args.window[0] + 64);
    if (args.rank == 0) {
        if (arch::thread_idx() != 0) return;
        for (int i = 0; i < 10; ++i) arch::sleep_ns(100);
        if (!numbers(args)[0]) mem.store(cell, 5, Order::release, Scope::system);
        output<int>(args)[0] = 1;
        return;
    }
    if (arch::thread_idx() == 0) {
        bool ok = mem.await(cell, Until::at_least, 5, Scope::system, Wait{Edge::x_ready, 0, 3});
        if (!ok) mem.raise_abort(0);
        output<int>(args)[args.rank] = ok ? 1 : 2;
    } else if (arch::thread_idx() == 32) {
        while (mem.load(cell, Order::acquire, Scope::system) < 5 && !mem.aborted()) arch::sleep_ns(200);
    }
}

// numbers[0] picks a mistake.
void misuse(const Args& args) {
    init_barriers(1, 1);
    uint8_t* smem = arch::dynamic_smem();
    bool first = arch::thread_idx() == 0;
    switch (numbers(args)[0]) {
        case 0:  // misaligned tile
            if (first) arch::tma_load_2d(smem + 512, table(args)[0].a, barriers(), 0, 0);
            break;
        case 1:  // two-dimensional map in a four-dimensional load
            if (first) arch::tma_load_4d(smem, table(args)[0].a, barriers(), 0, 0, 0, 0);
            break;
        case 2:  // no map at all
            if (first) arch::tma_load_2d(smem, table(args)[0].out, barriers(), 0, 0);
            break;
        case 3:  // past the end of shared memory
            if (first) arch::bulk_load(smem + smem_bytes - 16, args.rows_in, 32, barriers());
            break;
        case 4:  // more bytes than a barrier counts
            if (first) arch::mbar_arrive_expect_tx(barriers(), 1 << 20);
            break;
        case 5:  // more arrivals than expected
            if (first) {
                arch::mbar_arrive_expect_tx(barriers(), 16);
                arch::mbar_arrive(barriers());
            }
            break;
        case 6:  // no barrier there
            if (first) arch::mbar_wait(barriers() + 1, 0);
            break;
        case 7:  // lanes apart
            if (arch::lane_idx() < 7)
                arch::ballot(true);
            else
                arch::warp_sync();
            break;
        case 8:  // leaves with a copy under way
            if (first) {
                arch::mbar_arrive_expect_tx(barriers(), 32);
                arch::bulk_load(smem, args.rows_in, 32, barriers());
            }
            break;
        case 9:  // an ordinary store past the end
            if (first) smem[smem_bytes + 5] = 1;
            break;
        case 10: {  // different instructions in a warpgroup
            float acc[64];
            arch::wgmma<bf16_t>(acc, arch::make_desc(smem), arch::make_desc(smem + 16384),
                                arch::lane_idx() == 3);
            arch::wgmma_commit();
            arch::wgmma_wait<0>();
            break;
        }
        case 11:  // barrier of two sizes
            arch::named_sync(3, arch::warp_idx() == 0 ? 64 : 96);
            break;
        case 12:  // more registers than there are
            arch::registers_grow<248>();
            break;
        case 13:  // half a warpgroup
            if (arch::warp_idx() < 2) arch::registers_shrink<40>();
            break;
        case 14:  // the store's source is left behind unread
            if (first) arch::tma_store_2d(table(args)[0].a, smem, 0, 0);
            break;
        case 15:  // a lane strays from an aligned barrier
            if (arch::lane_idx() == 5) arch::warp_sync();
            arch::named_sync(3, 32);
            break;
        case 17:  // a store of two dimensions through a map of another number
            if (first) arch::tma_store_4d(table(args)[0].a, smem, 0, 0, 0, 0);
            break;
        case 18:  // adding what is not added
            if (first) arch::tma_reduce_add_4d(&table(args)[0].b, smem, 0, 0, 0, 0);
            break;
        case 19:  // a hint about another tensor
            if (first) arch::tma_prefetch_4d(table(args)[0].a, 0, 0, 0, 0);
            break;
        case 20:  // of three warpgroups: as many as an SM has, but more than the launch began with
            if (arch::warp_idx() < 4) {
                arch::registers_shrink<48>();
            } else {
                arch::registers_grow<232>();
            }
            break;
        case 16:  // two budgets in a warpgroup
            if (arch::warp_idx() == 0) {
                arch::registers_shrink<40>();
            } else {
                arch::registers_shrink<48>();
            }
            break;
    }
}

}  // namespace

MEGAMOE_HOST_ENTRY(test_ring, megamoe::ForwardArgs, ring, smem_bytes, 128);
MEGAMOE_HOST_ENTRY(test_load, megamoe::ForwardArgs, load, smem_bytes, 128);
MEGAMOE_HOST_ENTRY(test_store, megamoe::ForwardArgs, store, smem_bytes, 128);
MEGAMOE_HOST_ENTRY(test_gemm_bf16, megamoe::ForwardArgs, gemm<bf16_t>, 128 * 1024, 384);
MEGAMOE_HOST_ENTRY(test_gemm_e4m3, megamoe::ForwardArgs, gemm<e4m3_t>, 128 * 1024, 384);
MEGAMOE_HOST_ENTRY(test_named, megamoe::ForwardArgs, named, smem_bytes, 128);
MEGAMOE_HOST_ENTRY(test_warp, megamoe::ForwardArgs, warp, smem_bytes, 32);
MEGAMOE_HOST_ENTRY(test_convert, megamoe::ForwardArgs, convert, smem_bytes, 32);
MEGAMOE_HOST_ENTRY(test_elementary, megamoe::ForwardArgs, elementary, smem_bytes, 32);
MEGAMOE_HOST_ENTRY(test_await, megamoe::ForwardArgs, await, smem_bytes, 64);
MEGAMOE_HOST_ENTRY(test_misuse, megamoe::ForwardArgs, misuse, smem_bytes, 128);
MEGAMOE_HOST_ENTRY(test_misuse_384, megamoe::ForwardArgs, misuse, smem_bytes, 384);
MEGAMOE_HOST_ENTRY(test_misuse_512, megamoe::ForwardArgs, misuse, smem_bytes, 512);
MEGAMOE_HOST_EXPORT const char* test_edge_name(uint32_t edge) {
    return fibers::enumerator(edge_name(Edge(edge)));
}
