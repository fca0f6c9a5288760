// The one Python binding of every generated kernel: launch(params: bytes, context: int, *pointers: int).
//
// Included instead of torch/extension.h, which takes a minute to compile. `context` is the CUDA stream, or the number
// of threads on CPU. A kernel's source defines fxfuse_launch and fxfuse_error.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

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
        PyErr_Format(PyExc_TypeError, "launch takes params, context and at most %zd pointers", kMaxPointers);
        return nullptr;
    }
    char* bytes = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &size) != 0) return nullptr;
    if (size > kMaxParamBytes) {
        PyErr_Format(PyExc_ValueError, "params has %zd bytes, more than %zd", size, kMaxParamBytes);
        return nullptr;
    }
    alignas(8) char params[kMaxParamBytes];
    for (Py_ssize_t i = 0; i < size; ++i) params[i] = bytes[i];
    uint64_t values[kMaxPointers + 1];
    for (Py_ssize_t i = 1; i < count; ++i) {
        values[i - 1] = PyLong_AsUnsignedLongLong(args[i]);
        if (PyErr_Occurred() != nullptr) return nullptr;
    }
    int code = 0;
    Py_BEGIN_ALLOW_THREADS
    code = kEntry(params, values + 1, values[0]);
    Py_END_ALLOW_THREADS
    if (code != 0) {
        PyErr_Format(PyExc_RuntimeError, "%s (error %d)", kError(code), code);
        return nullptr;
    }
    Py_RETURN_NONE;
}

// A kernel's module. `functions` has the addresses of both its functions, for calls without Python (executor.h).
template <Entry kEntry, Error kError>
PyObject* make_module() {
    static PyMethodDef methods[] = {
        {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch<kEntry, kError>)), METH_FASTCALL,
         "launch(params, context, *pointers)"},
        {nullptr, nullptr, 0, nullptr}};
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxfuse_kernel", nullptr, -1, methods,
                                 nullptr,               nullptr,         nullptr, nullptr};
    PyObject* created = PyModule_Create(&module);
    if (created == nullptr) return nullptr;
    const auto entry = reinterpret_cast<unsigned long long>(kEntry);
    const auto error = reinterpret_cast<unsigned long long>(kError);
    PyObject* functions = Py_BuildValue("(KK)", entry, error);
    if (functions == nullptr || PyModule_AddObject(created, "functions", functions) != 0) {
        Py_XDECREF(functions);
        Py_DECREF(created);
        return nullptr;
    }
    return created;
}

}  // namespace fxfuse_binding

// Defines the module `name` of kernel number `number` in a unit (build.py).
#define FXFUSE_MODULE(name, number)                                                              \
    PyMODINIT_FUNC PyInit_##name() {                                                             \
        return fxfuse_binding::make_module<fxfuse_launch_##number, fxfuse_error_##number>();     \
    }
