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

using Sizes = c10::SmallVector<c10::SymInt, 4>;

// What an operator's parameter is kept in.
template <class Parameter>
struct Held {
  using Type = std::remove_cvref_t<Parameter>;
};
template <>
struct Held<c10::SymIntArrayRef> {
  using Type = Sizes;
};

class Reader {
 public:
  Reader(PyObject* const* arguments, Py_ssize_t count, Py_ssize_t wanted) : next_(arguments) {
    if (count != wanted) throw NotPlain();
  }

  // What the operators' parameters are read as, one after the other.
  void read(Tensor& value) { value = unpack(*next_++); }
  void read(int64_t& value) { value = integer(*next_++); }
  void read(double& value) { value = number(*next_++); }
  void read(c10::string_view& value) {
    Py_ssize_t size = 0;
    PyObject* const object = *next_++;
    const char* data = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    if (data == nullptr) throw NotPlain();
    value = c10::string_view(data, static_cast<size_t>(size));
  }
  void read(at::ScalarType& value) {
    PyObject* const object = *next_++;
    if (!THPDtype_Check(object)) throw NotPlain();
    value = reinterpret_cast<THPDtype*>(object)->scalar_type;
  }
  void read(Sizes& value) {
    PyObject* const object = *next_++;
    if (PyLong_CheckExact(object)) {
      value.emplace_back(integer(object));
      return;
    }
    if (!PyTuple_Check(object) && !PyList_CheckExact(object)) throw NotPlain();
    PyObject* const* items = PySequence_Fast_ITEMS(object);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i)
      value.emplace_back(integer(items[i]));
  }
  template <class Value>
  void read(std::optional<Value>& value) {
    if (*next_ == Py_None) {
      ++next_;
    } else {
      read(value.emplace());
    }
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

// A public operator as a function of Python's.
template <auto kOperator>
struct Entry;

PyObject* wrap(Tensor&& result) { return THPVariable_Wrap(std::move(result)); }

PyObject* wrap(WithSum&& results) {
  PyObject* const y = wrap(std::move(std::get<0>(results)));
  PyObject* const sum = y == nullptr ? nullptr : wrap(std::move(std::get<1>(results)));
  PyObject* const pair = sum == nullptr ? nullptr : PyTuple_Pack(2, y, sum);
  Py_XDECREF(y);
  Py_XDECREF(sum);
  return pair;
}

template <class Answer, class... Parameters, Answer (*kOperator)(Parameters...)>
struct Entry<kOperator> {
  static PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    try {
      Reader reader(arguments, count, sizeof...(Parameters));
      std::tuple<typename Held<Parameters>::Type...> values;
      std::apply([&](auto&... value) { (reader.read(value), ...); }, values);
      return wrap(run(values));
    } catch (const NotPlain&) {
      Py_RETURN_NOTIMPLEMENTED;
    }
    END_HANDLE_TH_ERRORS
  }

  template <class Values>
  static Answer run(const Values& values) {
    const pybind11::gil_scoped_release no_gil;
    return std::apply(kOperator, values);
  }
};

PyObject* subclass_hook = nullptr;

// set_subclass_hook(callable): what before_subclass() calls, or None.
PyObject* set_subclass_hook(PyObject*, PyObject* hook) {
  PyObject* const before = subclass_hook;
  subclass_hook = hook == Py_None ? nullptr : Py_NewRef(hook);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

template <auto kOperator>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Entry<kOperator>::call)),
          METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {method<&layer_norm>("layer_norm"),
                         method<&rms_norm>("rms_norm"),
                         method<&group_norm>("group_norm"),
                         method<&add_layer_norm>("add_layer_norm"),
                         method<&add_rms_norm>("add_rms_norm"),
                         method<&modulated_layer_norm>("modulated_layer_norm"),
                         method<&modulated_rms_norm>("modulated_rms_norm"),
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
