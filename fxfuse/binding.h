// The one Python binding of every generated kernel: launch(params: bytes, context: int, *pointers: int).
//
// Included instead of torch/extension.h, which takes a minute to compile. `context` is the CUDA stream, or the number
// of threads on CPU. A kernel source defines fxfuse_launch and fxfuse_error.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

// Runs the kernel; 0 or an error code. `params` is 8-byte aligned.
extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t context);
// What an error code means.
extern "C" const char* fxfuse_error(int code);

namespace fxfuse_binding {

constexpr Py_ssize_t kMaxPointers = 64;
constexpr Py_ssize_t kMaxParamBytes = 4096;

static PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t count) {
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
    code = fxfuse_launch(params, values + 1, values[0]);
    Py_END_ALLOW_THREADS
    if (code != 0) {
        PyErr_Format(PyExc_RuntimeError, "%s (error %d)", fxfuse_error(code), code);
        return nullptr;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch)), METH_FASTCALL,
     "launch(params, context, *pointers)"},
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxfuse_kernel", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace fxfuse_binding

#define FXFUSE_CONCATENATE_(a, b) a##b
#define FXFUSE_CONCATENATE(a, b) FXFUSE_CONCATENATE_(a, b)

// The kernel's two functions by address, for those that call it without Python (executor.h).
PyMODINIT_FUNC FXFUSE_CONCATENATE(PyInit_, TORCH_EXTENSION_NAME)() {
    PyObject* created = PyModule_Create(&fxfuse_binding::module);
    if (created == nullptr) return nullptr;
    const auto entry = reinterpret_cast<unsigned long long>(&fxfuse_launch);
    const auto error = reinterpret_cast<unsigned long long>(&fxfuse_error);
    PyObject* functions = Py_BuildValue("(KK)", entry, error);
    if (functions == nullptr || PyModule_AddObject(created, "functions", functions) != 0) {
        Py_XDECREF(functions);
        Py_DECREF(created);
        return nullptr;
    }
    return created;
}
