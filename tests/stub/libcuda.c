// A libcuda.so.1 that launches nothing and remembers everything: the test double of the CUDA driver.
// It refuses what the real one refuses: illegal tensor maps, and more dynamic shared memory than was asked for.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef struct { unsigned grid[3], block[3], smem; void* stream; struct Attribute* attributes; unsigned count; } Config;
struct Attribute { int id; char pad[4]; int value[16]; };
typedef struct { int type, rank, swizzle, promotion, fill; uint64_t base, dims[5], strides[4]; uint32_t box[5]; } Map;

int stub_launches, stub_loads, stub_attribute_ids[8], stub_attribute_values[8], stub_max_smem = 48 << 10;
int stub_blocks_per_sm = 1, stub_argument_bytes;
Config stub_config;
uint8_t stub_argument[16384];
Map stub_maps[64];
int stub_num_maps;

enum { ok = 0, invalid_value = 1, invalid_context = 201 };
int cuInit(unsigned flags) { return ok; }
int cuDriverGetVersion(int* v) { *v = 13000; return ok; }
int cuDeviceGet(int* device, int i) { *device = i; return ok; }
int cuDeviceGetAttribute(int* v, int which, int device) { *v = which == 16 ? 132 : which == 97 ? 232448 : 1; return ok; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)0x3000; return ok; }
int stub_no_context;  // this thread has none yet
int cuCtxGetCurrent(void** context) { *context = stub_no_context ? 0 : (void*)0x3000; return ok; }
int cuCtxSetCurrent(void* context) { stub_no_context = 0; return ok; }
int cuModuleLoadData(void** module, const void* image) { ++stub_loads; *module = (void*)0x1000; return ok; }
int cuModuleGetFunction(void** function, void* module, const char* name) { *function = (void*)0x2000; return ok; }
int cuFuncLoad(void* function) { return ok; }
int cuFuncGetAttribute(int* v, int which, void* function) { *v = which == 0 ? 512 : which == 11 ? 2 : 128; return ok; }
int cuFuncSetAttribute(void* function, int which, int v) {
    if (which == 8) stub_max_smem = v;
    return ok;
}
int cuOccupancyMaxActiveClusters(int* clusters, void* function, const Config* config) {
    if (config->count != 1 || config->attributes[0].id != 4) return invalid_value;  // CLUSTER_DIMENSION
    *clusters = stub_blocks_per_sm * 132 / config->attributes[0].value[0];
    return ok;
}
int cuGetErrorString(int error, const char** text) { *text = "the stub refuses"; return ok; }

int cuMemcpyHtoD(uint64_t to, const void* from, size_t bytes) {
    if (stub_no_context) return invalid_context;
    memcpy((void*)to, from, bytes);
    return ok;
}

int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
    if (stub_no_context) return invalid_context;
    if (config->smem > (unsigned)stub_max_smem) return invalid_value;
    ++stub_launches;
    stub_config = *config;
    for (unsigned i = 0; i < config->count && i < 8; ++i) {
        stub_attribute_ids[i] = config->attributes[i].id;
        stub_attribute_values[i] = config->attributes[i].value[0];
    }
    memcpy(stub_argument, arguments[0], stub_argument_bytes);
    return ok;
}

int cuTensorMapEncodeTiled(void* out, int type, unsigned rank, void* base, const uint64_t* dims, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
    if (stub_no_context) return 201;  // CUDA_ERROR_INVALID_CONTEXT
    Map map = {type, (int)rank, swizzle, promotion, fill, (uint64_t)base, {0}, {0}, {0}};
    int bytes = type == 0 ? 1 : type == 7 ? 4 : 2;  // uint8, float32, bfloat16
    if (!base || map.base % 16 || (uint64_t)out % 64 || box[0] * bytes > 128 || box[0] * bytes % 16) return invalid_value;
    for (unsigned i = 0; i < rank; ++i) {
        if (dims[i] < 1 || dims[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || steps[i] != 1) return invalid_value;
        if (i > 0 && (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40)) return invalid_value;
        map.dims[i] = dims[i];
        map.box[i] = box[i];
        if (i > 0) map.strides[i - 1] = strides[i - 1];
    }
    memset(out, 0, 128);
    memcpy(out, &map.base, 8);
    ((uint8_t*)out)[127] = (uint8_t)(stub_num_maps + 1);  // says which map this is
    if (stub_num_maps < 64) stub_maps[stub_num_maps++] = map;
    return ok;
}

int cuTensorMapReplaceAddress(void* map, void* base) {
    if (stub_no_context) return invalid_context;
    if (!base || (uint64_t)base % 16 || (uint64_t)map % 64) return invalid_value;
    memcpy(map, &base, 8);
    return ok;
}

int cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* status) {
    static void* self;
    if (!self) self = dlopen("libcuda.so.1", RTLD_LAZY);
    *out = dlsym(self, name);
    if (status) *status = *out ? 0 : 1;
    return *out ? ok : 500;
}
int cuGetProcAddress(const char* name, void** out, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, 0);
}
