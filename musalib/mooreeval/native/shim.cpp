// Built once per machine against the real headers. Three jobs:
//  1. the C functions of abi.h, through which light candidates reach libtorch;
//  2. `call`, which turns Python arguments into musa_value and back (the light path's pybind11);
//  3. the dispatcher trace: names of top-level aten operators, recorded by a process-wide RecordFunction callback.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <Python.h>

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi.h"

namespace {
thread_local std::string g_error;
thread_local int32_t g_kind = 0;

at::TensorImpl* impl(const musa_tensor* t) { return reinterpret_cast<at::TensorImpl*>(const_cast<musa_tensor*>(t)); }
at::Tensor borrow(const musa_tensor* t) {
  auto* p = impl(t);
  c10::raw::intrusive_ptr::incref(p);
  return at::Tensor(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim(p));
}
musa_tensor* give(at::Tensor t) { return reinterpret_cast<musa_tensor*>(t.unsafeReleaseTensorImpl()); }

template <class F> musa_tensor* guarded(F f) {
  try {
    return give(f());
  } catch (const c10::Error& e) { musa_set_error(e.what_without_backtrace(), 0);
  } catch (const std::bad_alloc& e) { musa_set_error(e.what(), 4);
  } catch (const std::exception& e) { musa_set_error(e.what(), 0); }
  return nullptr;
}
}  // namespace

MUSA_API const char* musa_last_error() { return g_error.c_str(); }
MUSA_API void musa_set_error(const char* text, int32_t kind) { g_error = text; g_kind = kind; }
MUSA_API void musa_retain(musa_tensor* t) { c10::raw::intrusive_ptr::incref(impl(t)); }
MUSA_API void musa_release(musa_tensor* t) { c10::raw::intrusive_ptr::decref(impl(t)); }
MUSA_API int64_t musa_dim(const musa_tensor* t) { return impl(t)->dim(); }
MUSA_API int64_t musa_numel(const musa_tensor* t) { return impl(t)->numel(); }
MUSA_API const int64_t* musa_sizes(const musa_tensor* t) { return impl(t)->sizes().data(); }
MUSA_API const int64_t* musa_strides(const musa_tensor* t) { return impl(t)->strides().data(); }
MUSA_API int32_t musa_dtype(const musa_tensor* t) { return static_cast<int32_t>(c10::typeMetaToScalarType(impl(t)->dtype())); }
MUSA_API int32_t musa_is_cpu(const musa_tensor* t) { return impl(t)->device().is_cpu(); }
MUSA_API int32_t musa_is_contiguous(const musa_tensor* t) { return impl(t)->is_contiguous(); }
MUSA_API void* musa_data(const musa_tensor* t) { return borrow(t).data_ptr(); }
MUSA_API musa_tensor* musa_contiguous(const musa_tensor* t) { return guarded([&] { return borrow(t).contiguous(); }); }
MUSA_API musa_tensor* musa_clone(const musa_tensor* t) { return guarded([&] { return borrow(t).clone(); }); }
MUSA_API musa_tensor* musa_new(const int64_t* sizes, int64_t dim, int32_t dtype, int32_t fill) {
  return guarded([&] {
    const at::IntArrayRef s(sizes, dim);
    const auto o = at::TensorOptions(static_cast<at::ScalarType>(dtype));
    return fill < 0 ? at::empty(s, o) : fill == 0 ? at::zeros(s, o) : at::ones(s, o);
  });
}
MUSA_API musa_tensor* musa_new_like(const musa_tensor* t, int32_t fill) {
  return guarded([&] { return fill < 0 ? at::empty_like(borrow(t)) : at::zeros_like(borrow(t)); });
}
MUSA_API musa_tensor* musa_view(const musa_tensor* t, const int64_t* sizes, int64_t dim) {
  return guarded([&] { return borrow(t).view(at::IntArrayRef(sizes, dim)); });
}
MUSA_API musa_tensor* musa_transpose(const musa_tensor* t, int64_t a, int64_t b) {
  return guarded([&] { return borrow(t).transpose(a, b); });
}

namespace {
// Python object -> musa_value. Lists are kept in `pool`, tensors are borrowed from the caller's arguments.
bool to_value(PyObject* o, musa_value& v, std::vector<std::vector<musa_value>>& pool) {
  v = {};
  if (o == Py_None) { v.tag = MUSA_NONE; return true; }
  if (PyBool_Check(o)) { v.tag = MUSA_BOOL; v.i = o == Py_True; return true; }
  if (PyLong_Check(o)) { v.tag = MUSA_INT; v.i = PyLong_AsLongLong(o); return !PyErr_Occurred(); }
  if (PyFloat_Check(o)) { v.tag = MUSA_DOUBLE; v.d = PyFloat_AsDouble(o); return true; }
  if (THPVariable_Check(o)) {
    v.tag = MUSA_TENSOR;
    v.tensor = reinterpret_cast<musa_tensor*>(THPVariable_Unpack(o).unsafeGetTensorImpl());
    return true;
  }
  if (PyList_Check(o) || PyTuple_Check(o)) {
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(o);
    pool.emplace_back(n);
    const size_t mine = pool.size() - 1;
    for (Py_ssize_t i = 0; i < n; ++i) {
      musa_value item;
      if (!to_value(PySequence_Fast_GET_ITEM(o, i), item, pool)) return false;
      pool[mine][i] = item;
    }
    v.tag = PyTuple_Check(o) ? MUSA_TUPLE : MUSA_LIST;
    v.count = static_cast<int32_t>(n);
    v.items = pool[mine].data();
    return true;
  }
  PyErr_Format(PyExc_TypeError, "incompatible function arguments: %s", Py_TYPE(o)->tp_name);
  return false;
}

PyObject* to_python(const musa_value& v) {
  switch (v.tag) {
    case MUSA_TENSOR:
      return THPVariable_Wrap(at::Tensor(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim(impl(v.tensor))));
    case MUSA_INT: return PyLong_FromLongLong(v.i);
    case MUSA_DOUBLE: return PyFloat_FromDouble(v.d);
    case MUSA_BOOL: return PyBool_FromLong(v.i);
    case MUSA_LIST:
    case MUSA_TUPLE: {
      PyObject* out = v.tag == MUSA_LIST ? PyList_New(v.count) : PyTuple_New(v.count);
      for (int32_t i = 0; out && i < v.count; ++i) {
        PyObject* item = to_python(v.items[i]);
        if (!item) { Py_DECREF(out); return nullptr; }
        if (v.tag == MUSA_LIST) PyList_SET_ITEM(out, i, item); else PyTuple_SET_ITEM(out, i, item);
      }
      return out;
    }
    default: Py_RETURN_NONE;
  }
}

using Bound = int32_t (*)(const musa_value*, int32_t, musa_value*);

// call(address, *arguments)
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const auto fn = reinterpret_cast<Bound>(PyLong_AsVoidPtr(args[0]));
  if (!fn) return nullptr;
  std::vector<musa_value> values(count - 1);
  std::vector<std::vector<musa_value>> pool;
  for (Py_ssize_t i = 1; i < count; ++i)
    if (!to_value(args[i], values[i - 1], pool)) return nullptr;
  musa_value out{};
  g_error.clear();
  if (fn(values.data(), static_cast<int32_t>(values.size()), &out) == 0) return to_python(out);
  PyObject* kinds[] = {PyExc_RuntimeError, PyExc_TypeError, PyExc_ValueError, PyExc_IndexError, PyExc_MemoryError};
  PyErr_SetString(kinds[g_kind >= 0 && g_kind < 5 ? g_kind : 0], g_error.c_str());
  return nullptr;
}

// --- dispatcher trace -----------------------------------------------------------------------------------------
std::mutex g_trace_lock;
std::set<std::string> g_seen;
bool g_tracing = false;
thread_local int g_depth = 0;

std::unique_ptr<at::ObserverContext> on_enter(const at::RecordFunction& fn) {
  if (g_depth++ == 0 && g_tracing) {
    std::lock_guard<std::mutex> hold(g_trace_lock);
    g_seen.insert(fn.name());
  }
  return nullptr;
}
void on_exit(const at::RecordFunction&, at::ObserverContext*) { --g_depth; }

PyObject* trace_install(PyObject*, PyObject*) {
  at::addGlobalCallback(at::RecordFunctionCallback(&on_enter, &on_exit).scopes({at::RecordScope::FUNCTION}));
  Py_RETURN_NONE;
}
PyObject* trace_start(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> hold(g_trace_lock);
  g_seen.clear();
  g_tracing = true;
  Py_RETURN_NONE;
}
PyObject* trace_stop(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> hold(g_trace_lock);
  g_tracing = false;
  PyObject* out = PyList_New(0);
  for (const auto& name : g_seen) {
    PyObject* text = PyUnicode_FromString(name.c_str());
    PyList_Append(out, text);
    Py_DECREF(text);
  }
  return out;
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)), METH_FASTCALL, "call(address, *arguments)"},
    {"trace_install", trace_install, METH_NOARGS, "Add the process-wide callback. Once, before the first trace."},
    {"trace_start", trace_start, METH_NOARGS, "Start to collect names of top-level operators."},
    {"trace_stop", trace_stop, METH_NOARGS, "Stop and return the sorted names."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "musa_shim", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
}  // namespace

PyMODINIT_FUNC PyInit_musa_shim() { return PyModule_Create(&module); }
