// The one Python binding of every generated kernel: launch(params: bytes, context: int, *pointers: int).
//
// `context` is the CUDA stream, or the number of threads on CPU. A kernel's source defines fxfuse_launch and
// fxfuse_error. A library has a Kernel for each, from which build.py makes the Python function.
//
// What is needed of Python is declared here, as its stable ABI has it (PEP 384). With Python.h a small kernel takes a
// fifth longer to compile, with torch/extension.h a minute.
#pragma once

#include <sys/types.h>

#include <cstdint>

extern "C" {
struct _object;
typedef struct _object PyObject;
struct _ts;
typedef struct _ts PyThreadState;
typedef ssize_t Py_ssize_t;

extern PyObject* PyExc_TypeError;
extern PyObject* PyExc_ValueError;
extern PyObject* PyExc_RuntimeError;
PyObject* PyErr_Format(PyObject* exception, const char* format, ...);
PyObject* PyErr_Occurred(void);
int PyBytes_AsStringAndSize(PyObject* bytes, char** buffer, Py_ssize_t* size);
unsigned long long PyLong_AsUnsignedLongLong(PyObject* number);
PyObject* Py_BuildValue(const char* format, ...);
PyThreadState* PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState* state);
}

namespace fxfuse_binding {

// Runs the kernel and returns 0 or an error code. `params` is 8-byte aligned.
using Entry = int (*)(const void* params, const uint64_t* pointers, uint64_t context);
// What an error code means.
using Error = const char* (*)(int code);

constexpr Py_ssize_t kMaxPointers = 64;
constexpr Py_ssize_t kMaxParamBytes = 4096;

template <Entry kEntry, Error kError>
PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count < 2 || count - 2 > kMaxPointers) {
        return PyErr_Format(PyExc_TypeError, "launch takes params, context and at most %zd pointers", kMaxPointers);
    }
    char* bytes = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &size) != 0) return nullptr;
    if (size > kMaxParamBytes) {
        return PyErr_Format(PyExc_ValueError, "params has %zd bytes, more than %zd", size, kMaxParamBytes);
    }
    alignas(8) char params[kMaxParamBytes];
    for (Py_ssize_t i = 0; i < size; ++i) params[i] = bytes[i];
    uint64_t values[kMaxPointers + 1];
    for (Py_ssize_t i = 1; i < count; ++i) {
        values[i - 1] = PyLong_AsUnsignedLongLong(args[i]);
        if (PyErr_Occurred() != nullptr) return nullptr;
    }
    PyThreadState* const state = PyEval_SaveThread();
    const int code = kEntry(params, values + 1, values[0]);
    PyEval_RestoreThread(state);
    if (code != 0) return PyErr_Format(PyExc_RuntimeError, "%s (error %d)", kError(code), code);
    return Py_BuildValue("");  // None
}

// The stable ABI's PyMethodDef, and the addresses of the kernel's functions for calls without Python (executor.h).
struct Kernel {
    const char* name;
    PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t);
    int flags;
    const char* documentation;
    Entry entry;
    Error error;
};

constexpr int kFastCall = 0x80;  // METH_FASTCALL

}  // namespace fxfuse_binding

// Defines the Kernel `name` of kernel number `number` in a unit (build.py).
#define FXFUSE_KERNEL(name, number)                                                                  \
    extern "C" {                                                                                     \
    __attribute__((visibility("default"))) fxfuse_binding::Kernel name = {                           \
        "launch", fxfuse_binding::launch<fxfuse_launch_##number, fxfuse_error_##number>,             \
        fxfuse_binding::kFastCall, "launch(params, context, *pointers)",                             \
        fxfuse_launch_##number, fxfuse_error_##number};                                              \
    }
