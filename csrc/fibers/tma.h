// Bulk copies between global and shared memory, asynchronous as on the device.
//
// A load poisons its destination, lands some rounds later and only then completes bytes on its mbarrier. A
// store's source is poisoned when bulk_wait_read returns. The device may read a source, and write a
// destination, at any time between issue and completion; here the seed picks the first or the last moment for
// each copy. So using data too early, or a buffer too soon, gives wrong results.
#pragma once
#include "fibers/barriers.h"
#include "fibers/numeric.h"

namespace fibers {

// What CUtensorMap is on the device: a tensor of up to 4 dimensions, innermost first, moved in boxes that are
// 128, 64 or 32 bytes wide, with the swizzle of that width.
struct alignas(64) EmulatedTensorMap {
    static constexpr uint32_t valid_mark = 0x70614d54;
    uint64_t base;
    uint32_t mark;
    uint32_t rank;
    uint64_t dims[4];           // elements
    uint64_t strides_bytes[3];  // of dimensions 1 ...
    uint32_t box[4];            // elements
    uint32_t element_bytes;
    uint32_t unused[5];
};
static_assert(sizeof(EmulatedTensorMap) == 128);

constexpr uint8_t poison = 0xff;  // NaN in e4m3, bf16 and fp32

const EmulatedTensorMap& check_map(const void* pointer, uint32_t rank, const char* what);
void tensor_load(Cta& cta, void* s_dst, const void* map, uint64_t* bar, uint32_t rank, const int (&at)[4]);
void tensor_load_both(void* s_dst, const void* map, uint64_t* bar, uint32_t rank, const int (&at)[4]);
void tensor_store(const void* s_src, const void* map, uint32_t rank, const int (&at)[4], bool, const char*);

#if defined(FIBERS_COMPILED)
// Bytes of a row of a box, and of the whole box.
uint32_t row_bytes(const EmulatedTensorMap& map) { return map.box[0] * map.element_bytes; }

const EmulatedTensorMap& check_map(const void* pointer, uint32_t rank, const char* what) {
    const auto& map = *static_cast<const EmulatedTensorMap*>(pointer);
    if (map.mark != EmulatedTensorMap::valid_mark) machine.fail("%s: this is no tensor map", what);
    if (map.rank != rank) machine.fail("%s: the tensor map has %u dimensions", what, map.rank);
    if (row_bytes(map) != 128 && row_bytes(map) != 64 && row_bytes(map) != 32)
        machine.fail("%s: the box is %u bytes wide, not 128, 64 or 32", what, row_bytes(map));
    if (map.base % 16) machine.fail("%s: the tensor's address is not a multiple of 16", what);
    for (uint32_t d = 0; d < rank; ++d) {
        if (map.dims[d] == 0) machine.fail("%s: dimension %u is empty", what, d);
        if (map.box[d] == 0 || map.box[d] > 256)
            machine.fail("%s: box dimension %u is %u", what, d, map.box[d]);
        if (d > 0 && map.strides_bytes[d - 1] % 16)
            machine.fail("%s: stride %u is not a multiple of 16 bytes", what, d);
    }
    return map;
}

uint32_t box_bytes(const EmulatedTensorMap& map) {
    uint32_t rows = 1;
    for (uint32_t d = 1; d < map.rank; ++d) rows *= map.box[d];
    return rows * row_bytes(map);
}

// Calls visit(row of the box, its address or null when out of bounds, bytes in bounds), rows in the order of
// shared memory.
template <class Visit>
void for_each_row(const EmulatedTensorMap& map, const int (&at)[4], Visit visit) {
    auto in_bounds = [&](uint32_t d, int64_t i) { return i >= 0 && static_cast<uint64_t>(i) < map.dims[d]; };
    int64_t columns = std::min<int64_t>(int64_t(map.dims[0]) - at[0], map.box[0]);
    if (at[0] < 0) columns = 0;  // the tiles of this kernel never start left of the tensor
    uint32_t bytes = columns > 0 ? uint32_t(columns) * map.element_bytes : 0;
    uint32_t extent[4] = {1, 1, 1, 1}, i[4] = {};
    for (uint32_t d = 1; d < map.rank; ++d) extent[d] = map.box[d];
    uint32_t row = 0;
    for (i[3] = 0; i[3] < extent[3]; ++i[3])
        for (i[2] = 0; i[2] < extent[2]; ++i[2])
            for (i[1] = 0; i[1] < extent[1]; ++i[1], ++row) {
                bool inside = bytes > 0;
                uint64_t address = map.base + uint64_t(at[0]) * map.element_bytes;
                for (uint32_t d = 1; d < map.rank; ++d) {
                    int64_t index = int64_t(at[d]) + i[d];
                    inside = inside && in_bounds(d, index);
                    address += uint64_t(index) * map.strides_bytes[d - 1];
                }
                visit(row, inside ? reinterpret_cast<uint8_t*>(address) : nullptr, inside ? bytes : 0u);
            }
}

// A box from global memory, unswizzled; zeros where it is out of bounds.
void gather_box(const EmulatedTensorMap& map, const int (&at)[4], uint8_t* out) {
    for_each_row(map, at, [&](uint32_t row, const uint8_t* address, uint32_t bytes) {
        uint8_t* to = out + row * row_bytes(map);
        if (bytes) memcpy(to, address, bytes);
        memset(to + bytes, 0, row_bytes(map) - bytes);
    });
}
// What a reduction does to elements of 2 bytes (bf16, rounded to nearest even) and 4 (fp32, subnormals
// flushed).
void add_elements(uint8_t* to, const uint8_t* from, uint32_t bytes, uint32_t element_bytes) {
    for (uint32_t i = 0; i < bytes; i += element_bytes) {
        if (element_bytes == 2) {
            uint16_t a, b;
            memcpy(&a, to + i, 2);
            memcpy(&b, from + i, 2);
            a = float_to_bf16(bf16_to_float(a) + bf16_to_float(b));
            memcpy(to + i, &a, 2);
        } else {
            float a, b;
            memcpy(&a, to + i, 4);
            memcpy(&b, from + i, 4);
            a = flushed(flushed(a) + flushed(b));
            memcpy(to + i, &a, 4);
        }
    }
}
void scatter_box(const EmulatedTensorMap& map, const int (&at)[4], const uint8_t* in, bool adds) {
    for_each_row(map, at, [&](uint32_t row, uint8_t* address, uint32_t bytes) {
        if (bytes && adds)
            add_elements(address, in + row * row_bytes(map), bytes, map.element_bytes);
        else if (bytes)
            memcpy(address, in + row * row_bytes(map), bytes);
    });
}
void copy_swizzled(uint8_t* shared_base, size_t offset, uint8_t* plain, size_t bytes, size_t row,
                   bool to_shared) {
    for (size_t i = 0; i < bytes; i += 16) {
        uint8_t* chunk = shared_base + swizzle(offset + i, row);
        if (to_shared)
            memcpy(chunk, plain + i, 16);
        else
            memcpy(plain + i, chunk, 16);
    }
}

void read_source(Load& load) {
    load.data.resize(load.bytes);
    if (load.map)
        gather_box(*static_cast<const EmulatedTensorMap*>(load.map), load.coordinates, load.data.data());
    else
        memcpy(load.data.data(), load.source, load.bytes);
}

void land(Load& load) {
    if (load.data.empty()) read_source(load);
    Cta& cta = *load.cta;
    if (load.map)
        copy_swizzled(cta.shared, size_t(load.destination - cta.shared), load.data.data(), load.bytes,
                      row_bytes(*static_cast<const EmulatedTensorMap*>(load.map)), true);
    else
        memcpy(load.destination, load.data.data(), load.bytes);
    --cta.loads_in_flight;
    complete_tx(cta, load.barrier, load.bytes);
}

void issue(Load&& load, const char* what) {
    check_mbarrier(*load.cta, load.barrier, what);
    load.due = machine.round + 1 + machine.delay();
    memset(load.destination, poison, load.bytes);
    if (machine.random() % 2) read_source(load);
    ++load.cta->loads_in_flight;
    ++machine.progress;
    machine.loads.push_back(std::move(load));
}

// A map may have two dimensions with one distance, so that a box ends where a box of one of them would not.
// Stores clip; loads through it were seen to touch memory outside of the tensor (H200, 2026-11-22).
void check_apart(const EmulatedTensorMap& map) {
    for (uint32_t d = 1; d + 1 < map.rank; ++d)
        for (uint32_t e = d + 1; e < map.rank; ++e)
            if (map.dims[d] > 1 && map.dims[e] > 1 && map.strides_bytes[d - 1] == map.strides_bytes[e - 1])
                machine.fail("tma_load: dimensions %u and %u have one distance, %llu bytes", d, e,
                             static_cast<unsigned long long>(map.strides_bytes[d - 1]));
}

// Into the shared memory of `cta`, where s_dst and bar lie.
void tensor_load(Cta& cta, void* s_dst, const void* pointer, uint64_t* bar, uint32_t rank,
                 const int (&at)[4]) {
    machine.preemption_point();
    const EmulatedTensorMap& map = check_map(pointer, rank, "tma_load");
    check_apart(map);
    uint32_t bytes = box_bytes(map);
    // 1024: the swizzle pattern's period, as the wgmma descriptors assume.
    check_shared(cta, s_dst, bytes, 8 * row_bytes(map), "tma_load");
    if (at[0] < 0) machine.fail("tma_load: column %d", at[0]);
    auto* to = static_cast<uint8_t*>(s_dst);
    issue(Load{&cta, to, bar, pointer, nullptr, {at[0], at[1], at[2], at[3]}, bytes, 0, {}}, "tma_load");
}
void tensor_load_both(void* s_dst, const void* pointer, uint64_t* bar, uint32_t rank, const int (&at)[4]) {
    for (int member = 0; member < cluster_ctas; ++member) {
        Cta& cta = member_cta(member, "tma_load_both");
        tensor_load(cta, ops::in_member(static_cast<uint8_t*>(s_dst), member), pointer,
                    ops::in_member(bar, member), rank, at);
    }
}

void read_source(Store& store) {
    if (!store.data.empty()) return;
    Cta& cta = *store.owner->cta;
    store.data.resize(store.bytes);
    copy_swizzled(cta.shared, size_t(store.source - cta.shared), store.data.data(), store.bytes, 128, false);
}
void write_destination(const Store& store) {
    scatter_box(*static_cast<const EmulatedTensorMap*>(store.map), store.coordinates, store.data.data(),
                store.adds);
    ++machine.progress;
}
void tensor_store(const void* s_src, const void* pointer, uint32_t rank, const int (&at)[4], bool adds,
                  const char* what) {
    machine.preemption_point();
    const EmulatedTensorMap& map = check_map(pointer, rank, what);
    uint32_t bytes = box_bytes(map);
    if (row_bytes(map) != 128) machine.fail("%s: the box is %u bytes wide", what, row_bytes(map));
    check_shared(*current->cta, s_src, bytes, 1024, what);
    if (at[0] < 0) machine.fail("%s: column %d", what, at[0]);
    if (adds && map.element_bytes != 2 && map.element_bytes != 4)
        machine.fail("%s: elements of %u bytes", what, map.element_bytes);
    auto* source = const_cast<uint8_t*>(static_cast<const uint8_t*>(s_src));
    Store store{current, pointer, source, {at[0], at[1], at[2], at[3]},
                bytes,   false,   false,  machine.random() % 2 == 0,
                adds,    {}};
    if (machine.random() % 2) read_source(store);
    current->cta->stores.push_back(std::move(store));
}
template <class Do>
bool for_each_store(Do act) {  // of the calling thread, committed
    bool any = false;
    for (Store& store : current->cta->stores)
        if (store.owner == current && store.committed) {
            any = true;
            act(store);
        }
    return any;
}
void linger() {  // completion takes a while
    for (uint32_t rounds = machine.delay(); rounds > 0; --rounds) machine.sleep();
}
#endif

}  // namespace fibers

namespace fibers::ops {

inline void tma_load_2d(void* s_dst, const void* map, uint64_t* bar, int c0, int c1) {
    tensor_load(*current->cta, s_dst, map, bar, 2, {c0, c1, 0, 0});
}
inline void tma_load_2d_both(void* s_dst, const void* map, uint64_t* bar, int c0, int c1) {
    tensor_load_both(s_dst, map, bar, 2, {c0, c1, 0, 0});
}
inline void tma_load_4d(void* s_dst, const void* map, uint64_t* bar, int c0, int c1, int c2, int c3) {
    tensor_load(*current->cta, s_dst, map, bar, 4, {c0, c1, c2, c3});
}
inline void tma_load_4d_both(void* s_dst, const void* map, uint64_t* bar, int c0, int c1, int c2, int c3) {
    tensor_load_both(s_dst, map, bar, 4, {c0, c1, c2, c3});
}
inline void tma_store_2d(const void* map, const void* s_src, int c0, int c1) {
    tensor_store(s_src, map, 2, {c0, c1, 0, 0}, false, "tma_store_2d");
}
inline void tma_store_4d(const void* map, const void* s_src, int c0, int c1, int c2, int c3) {
    tensor_store(s_src, map, 4, {c0, c1, c2, c3}, false, "tma_store_4d");
}
inline void tma_reduce_add_4d(const void* map, const void* s_src, int c0, int c1, int c2, int c3) {
    tensor_store(s_src, map, 4, {c0, c1, c2, c3}, true, "tma_reduce_add_4d");
}
inline void tma_prefetch_4d(const void* map, int, int, int, int) {
    machine.preemption_point();
    check_map(map, 4, "tma_prefetch_4d");
}
inline void bulk_commit() {
    for (Store& store : current->cta->stores)
        if (store.owner == current) store.committed = true;
}
inline void fence_proxy_async_shared() {}
void bulk_load(void* s_dst, const void* g_src, uint32_t bytes, uint64_t* bar);
void copy_async(void* s_dst, const void* g_src, bool exists);
void copies_wait();
void bulk_wait_read();
void bulk_wait();

#if defined(FIBERS_COMPILED)
void bulk_load(void* s_dst, const void* g_src, uint32_t bytes, uint64_t* bar) {
    machine.preemption_point();
    Cta& cta = *current->cta;
    check_shared(cta, s_dst, bytes, 16, "bulk_load");
    if (bytes == 0 || bytes % 16 || reinterpret_cast<uintptr_t>(g_src) % 16)
        machine.fail("bulk_load: %u bytes from %p, both must be multiples of 16", bytes, g_src);
    issue(Load{&cta, static_cast<uint8_t*>(s_dst), bar, nullptr, g_src, {}, bytes, 0, {}}, "bulk_load");
}

void copy_async(void* s_dst, const void* g_src, bool exists) {
    machine.preemption_point();
    check_shared(*current->cta, s_dst, 16, 16, "copy_async");
    if (reinterpret_cast<uintptr_t>(g_src) % 16)
        machine.fail("copy_async: from %p, no multiple of 16", g_src);
    memset(s_dst, poison, 16);
    auto* destination = static_cast<uint8_t*>(s_dst);
    current->cta->copies.push_back(Copy{current, destination, exists ? g_src : nullptr});
}
void copies_wait() {
    machine.preemption_point();
    std::erase_if(current->cta->copies, [](const Copy& copy) {
        if (copy.owner != current) return false;
        if (copy.source == nullptr) {
            memset(copy.destination, 0, 16);
        } else {
            memcpy(copy.destination, copy.source, 16);
        }
        return true;
    });
}

void bulk_wait_read() {
    if (!for_each_store([](Store&) {})) return;
    linger();
    for_each_store([](Store& store) {
        if (store.released) return;
        read_source(store);
        memset(store.source, poison, store.bytes);
        store.released = true;
        if (store.early_write) write_destination(store);
    });
}

void bulk_wait() {
    bulk_wait_read();
    if (!for_each_store([](Store&) {})) return;
    linger();
    for_each_store([](Store& store) {
        if (!store.early_write) write_destination(store);
    });
    auto& stores = current->cta->stores;
    stores.erase(std::remove_if(stores.begin(), stores.end(),
                                [](const Store& store) { return store.owner == current && store.committed; }),
                 stores.end());
}
#endif

}  // namespace fibers::ops
