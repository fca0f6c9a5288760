// Launches a list of kernels, each with addresses from one table. A program (program/) does this between torch's
// operators. Arguments: the launches, their references, the table, the first launch and the one after the last.
//
// On a GPU two more arguments follow: an array of cells, which are 0 at first, and the place in it of this list's cell.
// A cell holds the list's replays (replays.h). Without an array (0) there are none. A list without launches frees all
// replays of the array; then the last argument is the array's size.
#pragma once

#ifndef __CUDA_ARCH__  // nothing of it runs on a GPU

#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#include "replays.h"
#endif

namespace fxfuse_executor {

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

// Launches from one to another, and their addresses.
struct List {
    const Launch* begin;
    const Launch* end;
    const uint64_t* addresses;

    int launch(uint64_t context) const {
        for (const Launch* each = begin; each != end; ++each) {
            const int code = each->entry(each->params, addresses + (each->first - begin->first), context);
            if (code != 0) {
                message = each->error(code);
                return code;
            }
        }
        return 0;
    }
};

}  // namespace fxfuse_executor

extern "C" int fxfuse_launch(const void*, const uint64_t* arguments, uint64_t context) {
    using namespace fxfuse_executor;
    const auto* launches = reinterpret_cast<const Launch*>(arguments[0]);
    const auto* references = reinterpret_cast<const Reference*>(arguments[1]);
    const auto* table = reinterpret_cast<const uint64_t*>(arguments[2]);
    const Launch *begin = launches + arguments[3], *end = launches + arguments[4];
    thread_local std::vector<uint64_t> addresses;
    addresses.clear();
    if (begin != end) {
        const Reference* last = references + end[-1].first + end[-1].count;
        for (const Reference* each = references + begin->first; each != last; ++each) {
            addresses.push_back(table[each->slot] + each->offset);
        }
    }
    const List list{begin, end, addresses.data()};
#ifdef __CUDACC__
    auto* cells = reinterpret_cast<Replays**>(arguments[5]);
    const uint64_t place = arguments[6];
    if (begin == end) {
        for (uint64_t i = 0; i < place; ++i) {
            delete cells[i];
            cells[i] = nullptr;
        }
    } else if (cells != nullptr) {
        return Replays::of(cells[place]).launch(addresses, context, list);
    }
#endif
    return list.launch(context);
}

extern "C" const char* fxfuse_error(int) { return fxfuse_executor::message; }

#endif  // __CUDA_ARCH__
