// A short way from Python to the public operators: torch.ops.evenkeel.* parses its arguments by
// schema, which costs more than a small norm does.
//
// Each function takes all arguments of its operator by position and returns NotImplemented for what
// only the long way understands (symbolic sizes, wrong types); the caller then takes that.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "evenkeel/evenkeel.h"
#include "norm.h"

namespace evenkeel::torch_binding {
namespace {

// Thrown by a reader for an argument that it does not understand.
struct NotPlain {};

class Reader {
 public:
  Reader(PyObject* const* arguments, Py_ssize_t count, Py_ssize_t wanted) : next_(arguments) {
    if (count != wanted) throw NotPlain();
  }

  const Tensor& tensor() { return unpack(*next_++); }
  MaybeTensor maybe_tensor() {
    PyObject* const object = *next_++;
    if (object == Py_None) return std::nullopt;
    return unpack(object);
  }
  int64_t integer() { return integer(*next_++); }
  double number() { return number(*next_++); }
  std::optional<double> maybe_number() {
    PyObject* const object = *next_++;
    if (object == Py_None) return std::nullopt;
    return number(object);
  }
  std::optional<c10::string_view> maybe_word() {
    PyObject* const object = *next_++;
    if (object == Py_None) return std::nullopt;
    Py_ssize_t size = 0;
    const char* data = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    if (data == nullptr) throw NotPlain();
    return c10::string_view(data, static_cast<size_t>(size));
  }
  std::optional<at::ScalarType> maybe_dtype() {
    PyObject* const object = *next_++;
    if (object == Py_None) return std::nullopt;
    if (!THPDtype_Check(object)) throw NotPlain();
    return reinterpret_cast<THPDtype*>(object)->scalar_type;
  }
  c10::SmallVector<c10::SymInt, 4> sizes() {
    PyObject* const object = *next_++;
    if (PyLong_CheckExact(object)) return {c10::SymInt(integer(object))};
    if (!PyTuple_Check(object) && !PyList_CheckExact(object)) throw NotPlain();
    PyObject* const* items = PySequence_Fast_ITEMS(object);
    c10::SmallVector<c10::SymInt, 4> result;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i)
      result.emplace_back(integer(items[i]));
    return result;
  }

 private:
  static const Tensor& unpack(PyObject* object) {
    if (!THPVariable_Check(object)) throw NotPlain();
    return THPVariable_Unpack(object);
  }
  static int64_t integer(PyObject* object) {
    if (!PyLong_CheckExact(object)) throw NotPlain();
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) throw NotPlain();
    return value;
  }
  static double number(PyObject* object) {
    if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
    return static_cast<double>(integer(object));
  }

  PyObject* const* next_;
};

template <class Run>
PyObject* call(PyObject* const* arguments, Py_ssize_t count, Py_ssize_t wanted, const Run& run) {
  HANDLE_TH_ERRORS
  try {
    Reader read(arguments, count, wanted);
    return THPVariable_Wrap(run(read));
  } catch (const NotPlain&) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  END_HANDLE_TH_ERRORS
}

PyObject* py_layer_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call(arguments, count, 8, [](Reader& read) {
    const Tensor& x = read.tensor();
    const auto shape = read.sizes();
    const auto weight = read.maybe_tensor(), bias = read.maybe_tensor();
    const double eps = read.number();
    const auto activation = read.maybe_word();
    const double offset = read.number();
    const auto dtype = read.maybe_dtype();
    const pybind11::gil_scoped_release no_gil;
    return layer_norm(x, shape, weight, bias, eps, activation, offset, dtype);
  });
}

PyObject* py_rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call(arguments, count, 8, [](Reader& read) {
    const Tensor& x = read.tensor();
    const auto shape = read.sizes();
    const auto weight = read.maybe_tensor();
    const auto eps = read.maybe_number();
    const auto activation = read.maybe_word();
    const double offset = read.number();
    const auto casting = read.maybe_word();
    const auto dtype = read.maybe_dtype();
    const pybind11::gil_scoped_release no_gil;
    return rms_norm(x, shape, weight, eps, activation, offset, casting, dtype);
  });
}

PyObject* py_group_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call(arguments, count, 8, [](Reader& read) {
    const Tensor& x = read.tensor();
    const int64_t groups = read.integer();
    const auto weight = read.maybe_tensor(), bias = read.maybe_tensor();
    const double eps = read.number();
    const auto activation = read.maybe_word();
    const double offset = read.number();
    const auto dtype = read.maybe_dtype();
    const pybind11::gil_scoped_release no_gil;
    return group_norm(x, groups, weight, bias, eps, activation, offset, dtype);
  });
}

PyObject* subclass_hook = nullptr;

// set_subclass_hook(callable): what before_subclass() calls, or None.
PyObject* set_subclass_hook(PyObject*, PyObject* hook) {
  PyObject* const before = subclass_hook;
  subclass_hook = hook == Py_None ? nullptr : Py_NewRef(hook);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kFunction)),
          METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {method<py_layer_norm>("layer_norm"),
                         method<py_rms_norm>("rms_norm"),
                         method<py_group_norm>("group_norm"),
                         {"set_subclass_hook", set_subclass_hook, METH_O, nullptr},
                         {}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_torch", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

void before_subclass() {
  const pybind11::gil_scoped_acquire gil;
  if (subclass_hook == nullptr) return;
  const auto hook = pybind11::reinterpret_borrow<pybind11::object>(subclass_hook);
  hook();
}

}  // namespace evenkeel::torch_binding

PyMODINIT_FUNC PyInit__torch() { return PyModule_Create(&evenkeel::torch_binding::module); }
