// Launches a list of kernels, each with addresses from one table. A program (program/) does this between torch's
// operators. Arguments: the launches, their references, the table, the first launch and the one after the last.
#pragma once

#include <cstdint>

namespace fxfuse_executor {

constexpr uint64_t kMaxPointers = 64;  // as in binding.h

struct Launch {
    int (*entry)(const void* params, const uint64_t* pointers, uint64_t context);
    const char* (*error)(int code);
    const void* params;
    uint32_t first, count;  // of its references
};
static_assert(sizeof(Launch) == 32, "as program/write.py packs it");

struct Reference {
    uint64_t slot;    // in the table
    uint64_t offset;  // in bytes from there, modulo 2^64
};

static thread_local const char* message = "";

}  // namespace fxfuse_executor

extern "C" int fxfuse_launch(const void*, const uint64_t* arguments, uint64_t context) {
    using namespace fxfuse_executor;
    const auto* launches = reinterpret_cast<const Launch*>(arguments[0]);
    const auto* references = reinterpret_cast<const Reference*>(arguments[1]);
    const auto* table = reinterpret_cast<const uint64_t*>(arguments[2]);
    uint64_t pointers[kMaxPointers];
    for (uint64_t i = arguments[3]; i < arguments[4]; ++i) {
        const Launch& launch = launches[i];
        for (uint32_t j = 0; j < launch.count; ++j) {
            const Reference& reference = references[launch.first + j];
            pointers[j] = table[reference.slot] + reference.offset;
        }
        const int code = launch.entry(launch.params, pointers, context);
        if (code != 0) {
            message = launch.error(code);
            return code;
        }
    }
    return 0;
}

extern "C" const char* fxfuse_error(int) { return fxfuse_executor::message; }
