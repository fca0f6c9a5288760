// Compares tensors with an earlier state, and reads their addresses. A program (guard.py) asks for this at every call,
// for hundreds of tensors. torch's own Python functions take five times as long.
//
// Of torch's headers, only those of a tensor's C++ object are included: they take a second to compile. The caller has
// found out at which `offset` a tensor's Python object has the pointer to its C++ object.
#pragma once

#include <Python.h>

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <exception>
#include <unordered_map>
#include <unordered_set>

namespace fxfuse_guard {

constexpr int kDiffers = 1, kNoPlainTensor = 2;

enum Task : uint64_t { kCompare, kNote, kCompareTables, kMarkAlone, kReadVersions, kTellApart };

// A sequence of words that is either written down (`notes`) or compared with one written earlier.
struct Words {
    uint64_t* at;
    bool notes;
    bool alike = true;

    void next(uint64_t word) {
        if (notes) {
            *at = word;
        } else {
            alike = alike && *at == word;
        }
        ++at;
    }
};

inline uint64_t bits(c10::DispatchKeySet keys) { return keys.raw_repr(); }  // not const in older torch

inline const c10::TensorImpl* tensor_of(PyObject* object, uint64_t offset) {
    return *reinterpret_cast<c10::TensorImpl* const*>(reinterpret_cast<const char*>(object) + offset);
}

// The largest power of two that divides an address, `most` at most.
inline uint64_t alignment(uint64_t address, uint64_t most) { return (address | most) & -(address | most); }

inline void describe(PyObject* object, uint64_t offset, uint64_t most, Words& words, uint64_t* address) {
    words.next(reinterpret_cast<uint64_t>(Py_TYPE(object)));
    if (!words.alike) return;  // perhaps not a tensor
    const auto* tensor = tensor_of(object, offset);
    const auto device = tensor->device();
    words.next(bits(tensor->key_set()));
    words.next(static_cast<uint64_t>(c10::typeMetaToScalarType(tensor->dtype())) |
               static_cast<uint64_t>(static_cast<uint8_t>(device.type())) << 8 |
               static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16 |
               static_cast<uint64_t>(tensor->requires_grad()) << 24);
    words.next(tensor->dim());
    if (!words.alike) return;  // perhaps a tensor of another kind, without sizes
    for (const int64_t size : tensor->sizes()) words.next(size);
    for (const int64_t stride : tensor->strides()) words.next(stride);
    *address = reinterpret_cast<uint64_t>(static_cast<const c10::TensorImpl*>(tensor)->data());
    words.next(alignment(*address, most));
}

// Whether the dictionaries' values are `members`, in this order, and no others.
inline bool hold(PyObject* dictionaries, PyObject* members) {
    Py_ssize_t next = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dictionaries); ++i) {
        PyObject *key, *value;
        Py_ssize_t place = 0;
        while (PyDict_Next(PyList_GET_ITEM(dictionaries, i), &place, &key, &value)) {
            if (next == PyList_GET_SIZE(members) || PyList_GET_ITEM(members, next) != value) return false;
            ++next;
        }
    }
    return next == PyList_GET_SIZE(members);
}

// Marks the tensors of a list whose memory is used by tensors of the list only.
inline void mark_alone(PyObject* list, uint64_t offset, uint8_t* marks) {
    std::unordered_map<const c10::StorageImpl*, std::unordered_set<const c10::TensorImpl*>> owners;
    const Py_ssize_t count = PyList_GET_SIZE(list);
    for (const bool counts : {true, false}) {
        for (Py_ssize_t i = 0; i < count; ++i) {
            const auto* tensor = tensor_of(PyList_GET_ITEM(list, i), offset);
            const c10::Storage& storage = tensor->storage();
            auto& own = owners[storage.unsafeGetStorageImpl()];
            if (counts) {
                own.insert(tensor);
            } else {
                marks[i] = storage.use_count() == own.size();
            }
        }
    }
}

// Whether none of the first `first` tensors of a list shares its memory with another tensor of the list.
inline bool are_apart(PyObject* list, uint64_t offset, Py_ssize_t first) {
    std::unordered_set<const c10::StorageImpl*> memory;
    memory.reserve(first);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        const auto* storage = tensor_of(PyList_GET_ITEM(list, i), offset)->storage().unsafeGetStorageImpl();
        if (i < first ? !memory.insert(storage).second : memory.count(storage) != 0) return false;
    }
    return true;
}

// How often each tensor of a list was changed in place. 0 for inference tensors, which do not count changes.
inline void read_versions(PyObject* list, uint64_t offset, uint64_t* versions) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        const c10::VariableVersion& counter = tensor_of(PyList_GET_ITEM(list, i), offset)->version_counter();
        versions[i] = counter.enabled() ? counter.current_version() : 0;
    }
}

// Compares tensors and tables with their earlier state or, for kNote, notes the tensors' state. Writes the tensors'
// addresses.
inline bool compare(PyObject* list, const uint64_t* arguments, uint64_t* addresses) {
    Words words{reinterpret_cast<uint64_t*>(arguments[3]), arguments[0] == kNote};
    words.alike = hold(reinterpret_cast<PyObject*>(arguments[5]), reinterpret_cast<PyObject*>(arguments[6]));
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    words.next(bits(keys.included_));
    words.next(bits(keys.excluded_));
    const Py_ssize_t count = PyList_GET_SIZE(list);
    for (Py_ssize_t i = 0; i < count && words.alike; ++i) {
        describe(PyList_GET_ITEM(list, i), arguments[1], arguments[4], words, addresses + i);
    }
    return words.alike;
}

}  // namespace fxfuse_guard

// `context`: a list of tensors. arguments: a task, then the task's arguments. The caller keeps all of them alive.
//   kCompare, kNote: the offset, where addresses go, words, the largest alignment of addresses that matters, and two
//                    lists: dictionaries, and the values that they must hold
//   kCompareTables:  these two lists; no tensors
//   kMarkAlone:      the offset, where marks go, a byte for each tensor
//   kReadVersions:   the offset, where versions go
//   kTellApart:      the offset, and how many of the list's first tensors are asked about
extern "C" int fxfuse_launch(const void*, const uint64_t* arguments, uint64_t context) {
    using namespace fxfuse_guard;
    const PyGILState_STATE lock = PyGILState_Ensure();  // nobody else changes tensors meanwhile
    auto* list = reinterpret_cast<PyObject*>(context);
    int code = 0;
    try {
        if (arguments[0] == kMarkAlone) {
            mark_alone(list, arguments[1], reinterpret_cast<uint8_t*>(arguments[2]));
        } else if (arguments[0] == kReadVersions) {
            read_versions(list, arguments[1], reinterpret_cast<uint64_t*>(arguments[2]));
        } else if (arguments[0] == kTellApart) {
            code = are_apart(list, arguments[1], arguments[2]) ? 0 : kDiffers;
        } else if (arguments[0] == kCompareTables) {
            auto *tables = reinterpret_cast<PyObject*>(arguments[1]), *members = reinterpret_cast<PyObject*>(arguments[2]);
            code = hold(tables, members) ? 0 : kDiffers;
        } else if (!compare(list, arguments, reinterpret_cast<uint64_t*>(arguments[2]))) {
            code = kDiffers;
        }
    } catch (const std::exception&) {
        code = kNoPlainTensor;
    }
    PyGILState_Release(lock);
    return code;
}

extern "C" const char* fxfuse_error(int code) {
    return code == fxfuse_guard::kDiffers ? "a tensor is not what it was" : "a tensor without sizes or memory";
}
