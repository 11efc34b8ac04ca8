// One tensor-core product D[64, n] = A * B^T over 128 bytes of K, in every form that arch/ offers;
// tests/emulate/test_mma.py makes the images of shared memory and checks D.
#include "megamoe/arch/host/entry.h"

using namespace megamoe;

namespace {

constexpr int smem_bytes = 64 * 1024, box_bytes = 64 * 128;  // a box holds 64 of K
enum class Source { shared, registers };

// x: the image of B at 0, that of A (or A's plain rows, for registers) at 32 KB. y: D.
template <class Element, int sums, Major a_major, Major b_major, Source source>
void product(const Args& args) {
    uint8_t* smem = arch::dynamic_smem();
    const auto* image = static_cast<const uint8_t*>(args.rows_in);
    int thread = arch::thread_idx(), lane = arch::lane_idx(), warp = arch::warp_idx();
    for (int i = thread; i < 40 * 1024; i += 128) smem[i] = image[i];
    arch::fence_proxy_async_shared();
    arch::named_sync(0, 128);
    arch::Desc a =
        a_major == Major::k ? arch::make_desc(smem + 32768) : arch::make_desc_mn(smem + 32768, box_bytes);
    arch::Desc b = b_major == Major::k ? arch::make_desc(smem) : arch::make_desc_mn(smem, box_bytes);
    constexpr int depth = mma_k_bytes / static_cast<int>(sizeof(Element)), steps = 128 / mma_k_bytes;
    constexpr int a_step = a_major == Major::k ? mma_k_bytes : depth * 128,
                  b_step = b_major == Major::k ? mma_k_bytes : depth * 128;
    float acc[sums];
    uint32_t fragment[steps][4];
    arch::wgmma_fence();
    for (int i = 0; i < steps; ++i) {
        if constexpr (source == Source::shared) {
            arch::wgmma<Element, a_major, b_major>(acc, arch::desc_advance(a, i * a_step),
                                                   arch::desc_advance(b, i * b_step), i != 0);
        } else {
            for (int r = 0; r < 4; ++r) {
                int row = 16 * warp + lane / 4 + 8 * (r % 2), byte = 4 * (lane % 4) + 16 * (r / 2);
                memcpy(&fragment[i][r], image + 32768 + row * 128 + i * mma_k_bytes + byte, 4);
            }
            arch::fence_operand(fragment[i]);
            arch::wgmma<Element, b_major>(acc, fragment[i], arch::desc_advance(b, i * b_step), i != 0);
        }
    }
    arch::wgmma_commit();
    arch::wgmma_wait<0>();
    arch::fence_accumulator(acc);
    for (int i = 0; i < sums; ++i) {
        int row = 16 * warp + 8 * (i / 2 % 2) + lane / 4, column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        static_cast<float*>(args.rows_out)[row * 2 * sums + column] = acc[i];
    }
}

// numbers: 0 an MN-major descriptor where a K-major one is due, 1 one that starts inside a group of rows.
void misuse(const Args& args) {
    float acc[32];
    uint8_t* smem = arch::dynamic_smem();
    arch::Desc k = arch::make_desc(smem), mn = arch::make_desc_mn(smem + 8192, box_bytes);
    if (static_cast<const int32_t*>(args.topk_ids)[0] == 0) {
        arch::wgmma<bf16_t>(acc, k, mn, false);
    } else {
        arch::wgmma<bf16_t, Major::k, Major::mn>(acc, k, arch::desc_advance(mn, 32), false);
    }
}

}  // namespace

#define PRODUCT(name, Element, n, a, b, source)    \
    MEGAMOE_HOST_ENTRY(name, megamoe::ForwardArgs, \
                       (product<Element, n / 2, Major::a, Major::b, Source::source>), smem_bytes, 128);
#define PRODUCTS_K(n)                                             \
    PRODUCT(bf16_##n##_k_k_shared, bf16_t, n, k, k, shared)       \
    PRODUCT(bf16_##n##_mn_k_shared, bf16_t, n, mn, k, shared)     \
    PRODUCT(bf16_##n##_k_k_registers, bf16_t, n, k, k, registers) \
    PRODUCT(e4m3_##n##_k_k_shared, e4m3_t, n, k, k, shared)       \
    PRODUCT(e4m3_##n##_k_k_registers, e4m3_t, n, k, k, registers)
#define PRODUCTS_MN(n)                                          \
    PRODUCT(bf16_##n##_k_mn_shared, bf16_t, n, k, mn, shared)   \
    PRODUCT(bf16_##n##_mn_mn_shared, bf16_t, n, mn, mn, shared) \
    PRODUCT(bf16_##n##_k_mn_registers, bf16_t, n, k, mn, registers)
PRODUCTS_K(8)
PRODUCTS_K(16)
PRODUCTS_K(32)
PRODUCTS_K(64)
PRODUCTS_K(128)
PRODUCTS_K(256)
PRODUCTS_MN(64)
PRODUCTS_MN(128)
PRODUCTS_MN(256)
MEGAMOE_HOST_ENTRY(mma_misuse, megamoe::ForwardArgs, misuse, smem_bytes, 128);
